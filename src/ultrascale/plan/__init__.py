"""Memory and time of a run, predicted from `description`, `work` and `schedules`. Python and NumPy: no torch.

Where to begin, by question. Every file opens with what it is for; `docs/planner-internals.md` has the whole.

report      everything that `ultrascale plan` says of one run, as data
memory      what one rank holds, moment by moment: the actions of a step replayed
time        where the time of a step goes
search      all legal layouts of some devices; the best of them, and why
columns     memory of many layouts at once, for the search
pipeline    a schedule played with prices
laws        seconds of products, attention and messages
view        all of it drawn
flags       a plan as the settings of another trainer
workload    what is asked, with `layouts`: tables of them
costs       failures, checkpoints, budgets
constants, intervals, flops, split_backward  what several rooms need
"""
