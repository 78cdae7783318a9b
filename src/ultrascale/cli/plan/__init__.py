"""Verbs of the planner: `plan`, `plan far`, `page`, `validate`."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is there: threads of small products only wait for one another
