"""Schedules as data: pure functions that return lists of actions. The trainer executes the lists, the planner replays them.

actions            the vocabulary: F, B, I and W of a micro-batch on a stage
accumulate         the list of a rank without a pipeline
build              the lists of a pipeline by the schedule's name, each from a file of `kinds`
executable         whether lists can be executed at all, or wait for each other for ever
sharded            where ZeRO puts its collectives in such a list
messages           what the ranks send one another
"""
