"""One rank of a run, traced without a cluster: the trainer's own code on the meta device, which has shapes and no memory.

rank               a rank traced
recording          how it comes to believe that it is one of many; every operation seen as it is dispatched
planned            what the planner says of the same rank
allocator          what CUDA would be asked for
views              a trace on a terminal, as files, and why a rank runs out of memory
"""
