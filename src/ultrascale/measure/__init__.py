"""What really happens on this machine, and the plan held against it.

memory             live bytes of tensors by category, operation by operation
waterfall          where the time of a step went (from profile_events, spans and categories; told by step_report)
machine, doctor    what this machine can reach; what it has, and what would stop a run
compare, summary   planned beside measured; a run in a few numbers
plots              pictures of a run
"""
