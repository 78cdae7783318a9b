"""Traces one rank of a run without a cluster: runs the trainer's code on the meta device, which has shapes but no memory.

rank               traces a rank
recording          simulates the other ranks; records every dispatched operation
planned            the plan of the same rank, for comparison
allocator          memory that torch's allocator would reserve on CUDA
views              a trace on a terminal, as files, and why a rank runs out of memory
"""
