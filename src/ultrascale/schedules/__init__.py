"""Pipeline schedules as data: pure functions return lists of actions, which the trainer executes and the planner simulates.

actions            the vocabulary: F, B, I and W of a micro-batch on a stage
accumulate         the list of a rank without a pipeline (gradient accumulation)
build              builds a pipeline's lists by the schedule's name, each from a file of `kinds`
executable         checks that lists can be executed without deadlock
sharded            places ZeRO's collectives in such a list
messages           messages between the ranks
"""
