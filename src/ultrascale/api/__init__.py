"""The verbs as Python functions, `ultrascale.plan(...)` and so on; the command line calls the same ones and prints.

A verb has its options (a frozen dataclass: names, defaults and help of the command line's flags too), a function from options
to a result, and a function of keywords for people, which reads them as the command line would. A result is a frozen dataclass
with `to_dict()`, which is what `--json` prints, `to_frame()`, a `repr` of one line, and what a notebook shows of it.

extras          packages that only some verbs need
asked           keywords as options, and as the words of the command line that ask for the same
plan_request    a question to the planner: options, settings of the run, words
plan_conflicts  what cannot be asked together
plan            its answer, for a run's file, a model on accelerators, or a machine nobody has measured
plan_search     the search behind it
plan_result     one plan; a search; two plans compared
schedule        a pipeline schedule played, or all of them
trace           any rank of a job
check           N processes against one
sweep           many layouts measured
report          a run's folder summed up
run_of          the run, machines and circumstances of a question
shown           tables for notebooks and pandas; pictures
documents       what each result's `to_dict` holds, key by key
json_schema     JSON Schemas of those, and of run.toml; `stamp` says which a JSON follows
stub            what type checkers see
"""
