"""Machines, models and trainers known by name. Numbers are in TOML files, each with its source.

cluster            data of machines for the planner: accelerators, links, nodes
accelerators, machines   their tables; machine_file reads a user's own machine
network, racks     kinds of networks between nodes; racks with one fast network inside
models             presets of models
stacks             trainers: the tensors that each keeps in memory, and the communication that it overlaps
"""
