"""Proof that a layout computes what one process computes.

prove              the proof of some cases
small, cases       a run at a size that one machine can prove; its layouts, embeddings and accumulations
oracle             what one process computes, and how all processes are watched
compare            what differs
faults             mistakes that are planted, which the proof must see
matrix, support    all combinations that are proven; the page that lists them
"""
