"""A trace for people: terminal, files, and reasons.

view, files        on a terminal; as pictures and traces for tools
explain            why a rank runs out of memory
compare, lines     beside the plan; lines of code
"""
