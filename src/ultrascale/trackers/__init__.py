"""Experiment trackers, which follow a run's `metrics.jsonl` in a process of their own.

    rank 0 ----------> metrics.jsonl ----------> follower process ----------> wandb, mlflow, trackio, tensorboard
              a line                   reads it              a thread each

`train.observers.metrics` starts that process beside rank 0, and passes on what it has to say. Training never calls a tracker:
a network that hangs, a key that is wrong, a full disk or a library that crashes cost no step. Whatever a tracker lacks it is
given once it answers again, or at the next start, and no step twice. The alternative, calling them between steps, blocks every
rank for as long as a tracker's own retries take, minutes in MLflow.

__main__, follow   the process: reads new rows, hands them to trackers, tries again;
                   adds processor, memory, disk and GPUs of this machine
tracker            what a tracker is told, and must be able to do
to_*               the four
"""
