"""Measurements on this machine, and comparison of the plan with them.

memory             live bytes of tensors by category, operation by operation
step               measured time of a step, by category
machine            peak rates of this machine; its resources, and problems that would stop a run
compare, summary   planned against measured; a run in a few numbers
plots              pictures of a run
"""
