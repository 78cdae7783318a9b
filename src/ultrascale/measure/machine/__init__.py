"""Capabilities of this machine.

doctor             what it has, and what would stop a run
ceilings           the fastest product and copy
network, network_rank, timed   collectives, as nccl-tests measures them
"""
