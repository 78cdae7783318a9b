"""The training loop and its parts. `docs/architecture.md` walks through one step, from the command to the update.

loop               a run from start to end: join, build, go on, step, save, leave. Begin here
trainer            one rank's state between steps, and the step
micro_batches      the sequences of a step, as one rank's forward passes see them
passes             forward and backward passes, in the order of `schedules`
optimizer          the optimizer of a rank's parameters (with muon, compact_adamw, host_optimizer)
resume, saves      what a checkpoint holds and going on from it; what is done when one cannot be written
metrics            rows, lines and events that a run leaves (with performance)
data_check         data compared with their manifests, before the first step and meanwhile
anomalies, repeat  steps that cannot be right, and arithmetic that went wrong
deadline           saving and leaving before the time of a job is over
worker             the process of one rank, as a launcher starts it
"""
