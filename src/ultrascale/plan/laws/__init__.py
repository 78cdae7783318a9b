"""Fitted laws of devices and networks: seconds of products, attention, element-wise work and messages.

compute, curves, devices    products and attention; `fitted_curves` has the constants
collectives, nccl, network  messages inside a node and across nodes; `nvlink_fits` has the constants
"""
