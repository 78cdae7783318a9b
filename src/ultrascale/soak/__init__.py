"""A small run under injected faults, and the proof that it ends like an undisturbed one."""
