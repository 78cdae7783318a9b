"""Verbs of the planner: `plan`, `plan far`, `page`, `validate`."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded: threads of small GEMMs only wait for one another
