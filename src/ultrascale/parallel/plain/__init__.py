"""Every axis of parallelism in its shortest exact form: to read before the rooms beside it, which are fast. Nothing trains
with these.

data       replicas, and Adam's moments cut over them (ZeRO 1)
tensor     a feed-forward layer over ranks
ring       attention over a sequence that is cut
pipeline   the actions of a schedule, executed
expert     tokens to their experts and back

Each is held to one process in float64 by a test.
"""
