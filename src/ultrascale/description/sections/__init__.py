"""Sections of a run that do not affect what a step computes: launch, trackers, islands.

launch, trackers   `[launch]`; `[log.wandb]` and its like
islands            `[islands]`: training with little communication
"""
