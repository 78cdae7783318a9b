"""Verbs of a first hour: `demo`, `doctor`, `primer`."""
