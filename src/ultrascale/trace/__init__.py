"""One rank of a run, traced without a cluster: the trainer's own code on the meta device, which has shapes and no memory.

rank               a rank traced
pretend            how it comes to believe that it is one of many, on a device that is not here
recorder, record   every operation seen as it is dispatched; what is known of it afterwards
planned, compare   what the planner says of the same rank; the two side by side
allocator          what CUDA would be asked for
explain            why a rank runs out of memory, and what to change
view, files        a trace on a terminal, and as files
"""
