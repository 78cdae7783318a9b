"""Capabilities of this machine.

doctor             resources of the machine, and problems that would stop a run
ceilings           rate of the fastest large GEMM
network, network_rank, timed   speed of collectives, measured as by nccl-tests
"""
