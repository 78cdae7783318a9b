"""`us.plan`, `us.search`, `us.compare`.

plan               begin here
plan_request       a question: its options, units and defaults
plan_conflicts, run_of   options that exclude each other; the run that a question is about
plan_search        the search
plan_result        results (plan_page: for drawing on a page)
"""
