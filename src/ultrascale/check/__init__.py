"""Proof that a layout computes what one process computes.

prove              the proof of some cases
small, case        a run at a size that one machine can prove; one thing to prove
documents          made-up sequences that meet the edges of a layout
messages           whether ranks wait for what they read
reference          what one process computes: plain PyTorch, one sequence at a time
transformers_loop  what a plain loop of transformers computes, which shares only the initial weights
gathered, compare  whole tensors out of the ranks' parts; what differs
faults             mistakes that are planted, which the proof must see
matrix, support    all combinations that are proven; the page that lists them
"""
