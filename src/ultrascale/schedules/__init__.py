"""What runs when, as data: one pure function a schedule. The trainer executes the lists, the planner replays them.

actions            the vocabulary: F, B, I and W of a micro-batch on a stage
accumulate         the list of a rank without a pipeline
build              the lists of a pipeline by the schedule's name, each from a file of its own (one_f_one_b, zb_v, ...)
custom             a list from a file
executable         whether lists can be executed at all, or wait for each other for ever
sharded            where ZeRO puts its collectives in such a list
messages           what the ranks send one another
"""
