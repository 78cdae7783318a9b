"""The training loop and its parts. `docs/architecture.md` walks through one step, from the command to the update.

loop               a run from start to end: join, restore, step, save, leave. Begin here
session            what the loop has and whom it tells: joining, beginning, moments, and what is rare
trainer            one rank's state between steps, and the step
micro_batches      the sequences of a step, as one rank's forward passes see them
passes             forward and backward passes, in the order of `schedules`
optimizers         from gradients to new weights
observers          what watches steps and the loop: metrics, anomalies, digests, stragglers
start, folder, watch   before the first step; the run's folder; runs that stop, hang or die
evaluate, corpora, speed   held-out loss; a run's data; its speed beside the plan
worker             the process of one rank, as a launcher starts it
"""
