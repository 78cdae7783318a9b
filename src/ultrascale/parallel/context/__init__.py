"""Context parallelism: one sequence over several ranks, by a ring, by all-to-all (Ulysses), or both.

context_parallel   put on a decoder: begin here
context_ring       ring attention, hop by hop (context_gather: all keys at once)
context_swap       sequence swapped for heads
context_attention, context_operation   one function of autograd; one operation for the compiler
context_masks      who sees whom
"""
