"""Verbs as Python functions, `ultrascale.plan(...)` and so on; the command line calls the same functions and prints.

A verb has options (a frozen dataclass: names, defaults and help of the command line's flags too), a function from options to a
result, and a public function of keywords, which it reads as the command line would. A result is a frozen dataclass with
`to_dict()`, the output of `--json`, `to_frame()`, a `repr` of one line, and a display for notebooks.

extras          packages that only some verbs need
keywords        keywords as options, and as the equivalent command line
planning        a request to the planner, and its result: one plan, a search, two plans compared
schedule        a pipeline schedule simulated, or all of them
trace           any rank of a job, run with shapes in place of numbers
check           N processes compared with one
sweep           many layouts measured
report          summary of a run's folder
displays        tables for notebooks and pandas; pictures
stamp           version of the JSON Schema that each result's `to_dict` follows
"""
