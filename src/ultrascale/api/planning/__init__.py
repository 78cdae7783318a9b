"""`us.plan`, `us.search`, `us.compare`.

plan               begin here
plan_request       a question: its words, units and defaults
plan_conflicts, run_of   what cannot be asked together; the run that is asked about
plan_search        the search
plan_result        what is given back (plan_page: as a page draws it)
"""
