"""Memory and time of a run, predicted from `description`, `work` and `schedules`. Python and NumPy: no torch.

Where to begin, by question. The docstring of each file states its purpose; `docs/planner-internals.md` explains the whole.

report      everything that `ultrascale plan` reports for one run, as data
memory      memory of one rank over a step, by replaying its actions
time        seconds of a step, by part
search      all legal layouts of a number of devices; the best of them, and why
columns     memory of many layouts at once, for the search
pipeline    simulation of a pipeline schedule with durations
laws        seconds of GEMMs, attention and messages
view        tables and pictures of plans
flags       a plan as the settings of another trainer
workload    model, batch and machines of a plan; `layouts`: tables of layouts
costs       failures, checkpoints, budgets
constants, intervals, flops, split_backward  shared by several packages
"""
