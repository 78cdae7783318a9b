"""The training loop and its parts. `docs/architecture.md` walks through one step, from the command to the update.

loop               a run from start to end: join, restore, step, save, leave. Begin here
session            state of the loop and the events that observers receive: joining, beginning, moments
trainer            one rank's state between steps, and the step
micro_batches      the sequences of a step, as one rank's forward passes read them
passes             forward and backward passes, in the order of `schedules`
optimizers         from gradients to new weights
observers          observers of steps and of the loop: metrics, anomalies, digests, stragglers
start, folder, watch   before the first step; the run's folder; runs that stop, hang or crash
evaluate, corpora, speed   validation loss; a run's data; measured against planned speed
worker             the process of one rank, as a launcher starts it
"""
