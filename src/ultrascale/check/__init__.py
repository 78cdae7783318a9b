"""Proof that a layout computes the same numbers as one process.

prove              the proof of given cases
small, cases       a run scaled down to one machine; its layouts, embeddings and accumulations
oracle             the single-process reference, and instruments on all processes
compare            differences
faults             planted bugs, which the proof must detect
matrix, support    all proven combinations; the page that lists them
"""
