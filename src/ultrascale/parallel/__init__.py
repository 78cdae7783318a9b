"""Parallelism, applied to a model from outside. The model knows nothing of it: `models` is plain, and its seams are filled from
here.

apply              the order in which everything below is put on a model; what comes out is a `share`
share              what one rank holds, and what is still to be summed at the end of a step
mesh, groups       the processes of a run; who talks to whom
data               data parallelism and ZeRO: FSDP2
tensor             tensor and sequence parallelism
context            sequences cut over ranks
expert             experts over ranks (with all_to_all)
pipeline           the lists of `schedules` executed
precision          dtypes, fp8
activations        recomputation and offload
arrival, lost, time_limits, tags   ranks that are late or gone; what a message is
"""
