"""Every axis of parallelism in its shortest exact form, to read before the fast packages next to it. Nothing trains with these.

data       replicas, and Adam's moments sharded over them (ZeRO 1)
tensor     a tensor-parallel feed-forward layer
ring       ring attention over a sharded sequence
pipeline   executes the actions of a schedule
expert     sends tokens to their experts, and results back

A test compares each with one process in float64.
"""
