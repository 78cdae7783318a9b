"""A small run under a storm of faults, and the proof that it ends where a calm one does."""
