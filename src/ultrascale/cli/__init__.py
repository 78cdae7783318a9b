"""Verbs only: a module parses its arguments, calls one function, and prints."""
