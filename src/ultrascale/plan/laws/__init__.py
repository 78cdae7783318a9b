"""Fitted laws of devices and networks: seconds of GEMMs, attention, element-wise operations and messages.

compute, curves, devices    GEMMs and attention; `computing.toml` has the constants
collectives, nccl, network  messages inside a node and across nodes; `collectives.toml` has the constants
"""
