"""Context parallelism: one sequence sharded over several ranks, by a ring, by all-to-all (Ulysses), or both.

context_parallel   applies it to a decoder: begin here
context_ring       ring attention, hop by hop (context_gather: all keys at once)
context_swap       all-to-all between sequence shards and heads
context_attention, context_operation   one autograd function; one operation for the compiler
context_masks      which queries see which keys
"""
