"""Sections of a run that decide nothing of one step: how it is launched, what it is told to trackers, islands.

launch, trackers   `[launch]`; `[log.wandb]` and its like
islands            `[islands]`: training with little communication
"""
