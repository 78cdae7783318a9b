"""Verbs to start with: `demo`, `doctor`, `primer`."""
