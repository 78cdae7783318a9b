"""Kernels are run by Triton's interpreter; Triton is built for Linux alone."""

import sys

collect_ignore = [] if sys.platform == "linux" else ["test_lessons.py", "test_compiles.py"]
