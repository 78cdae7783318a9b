"""Measurements on this machine, and comparison of the plan with them.

memory             live bytes of tensors by category, operation by operation
step               where the time of a step went
machine            what this machine can reach; what it has, and what would stop a run
compare, summary   planned beside measured; a run in a few numbers
plots              pictures of a run
"""
