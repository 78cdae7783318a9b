"""References for the proof, and instruments that watch trainer and reference.

reference, transformers_loop   one process in float64; a training loop around transformers
documents          synthetic sequences with edge cases
gathered, messages unsharded tensors from shards; monitored messages
"""
