"""Fitted laws of devices and networks: seconds of products, attention, element-wise work and messages.

compute, curves, devices    products and attention; `computing.toml` has the constants
collectives, nccl, network  messages inside a node and across nodes; `collectives.toml` has the constants
"""
