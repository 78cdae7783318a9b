"""Verbs: each module parses its arguments, calls one function, and prints."""
