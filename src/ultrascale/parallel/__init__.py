"""Parallelism, applied to a model from outside: `models` contains no parallel code, and this package replaces the seams (hooks)
that it leaves open.

apply              applies everything below to a model, in a fixed order; returns a `share`
share              the part of the model that one rank holds, and the sums left for the end of a step
mesh, groups       the processes of a run and their process groups
data               data parallelism and ZeRO: FSDP2
tensor             tensor and sequence parallelism
context            context parallelism: sequences sharded over ranks
expert             expert parallelism (with all_to_all)
pipeline           executes the action lists of `schedules`
precision          dtypes, fp8
activations        activation recomputation and offload
arrival, lost, time_limits, tags   late or lost ranks, time-outs, message tags
"""
