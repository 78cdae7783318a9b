"""Experiment trackers, which follow a run's `metrics.jsonl` in a separate process.

    rank 0 ----------> metrics.jsonl ----------> follower process ----------> wandb, mlflow, trackio, tensorboard
              a line                   reads it              a thread each

`train.observers.metrics` starts that process beside rank 0, and logs its messages. Training never calls a tracker: a network
that hangs, a wrong key, a full disk or a library that crashes cost no step. A tracker receives missing rows once it responds
again, or at the next start, and no step twice. The alternative, calling trackers between steps, blocks every rank for as long
as a tracker's own retries take, minutes in MLflow.

__main__, follow   the process: reads new rows, sends them to trackers, retries;
                   adds CPU, memory, disk and GPU figures of this machine
tracker            a tracker's inputs and interface
to_*               the four trackers
"""
