"""Memory and time, predicted from `spec` and `schedules`. Plain Python: no torch, no NumPy."""
