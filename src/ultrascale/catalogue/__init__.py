"""Catalogue of machines, models and frameworks. Numbers are in TOML files, each with its source.

cluster            machines for the planner: accelerators, links, nodes
machines           their tables; machine_file reads a user's own machine
network, racks     types of networks between nodes; racks with one fast network inside
models             presets of models
stacks             frameworks: the tensors that each keeps in memory, and the communication that it overlaps
"""
