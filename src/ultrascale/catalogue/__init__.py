"""Machines, models and trainers known by name. Numbers are in TOML files, each with its source.

cluster            a machine as the planner sees it: accelerators, links, nodes
accelerators, machines   the tables of both; machine_file is a machine of one's own
network, racks     kinds of networks between nodes; racks with one fast network inside
models             presets of models
stacks             trainers: what each keeps in memory and hides behind computation
"""
