"""The verbs as Python functions, `ultrascale.plan(...)` and so on; the command line calls the same ones and prints.

A verb has its options (a frozen dataclass: names, defaults and help of the command line's flags too), a function from options
to a result, and a function of keywords for people, which reads them as the command line would. A result is a frozen dataclass
with `to_dict()`, which is what `--json` prints, `to_frame()`, a `repr` of one line, and what a notebook shows of it.

extras          packages that only some verbs need
keywords        keywords as options, and as the words of the command line that ask for the same
planning        a question to the planner, and its answer: one plan, a search, two plans compared
schedule        a pipeline schedule played, or all of them
trace           any rank of a job
check           N processes against one
sweep           many layouts measured
report          a run's folder summed up
displays        tables for notebooks and pandas; pictures
schemas         what each result's `to_dict` holds, key by key; the JSON Schemas, and what type checkers see
"""
