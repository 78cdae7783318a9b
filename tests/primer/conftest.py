"""Kernels are run by Triton's interpreter, where there is triton: it has no build for every machine that trains on a CPU."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["test_lessons.py", "test_compiles.py"]
