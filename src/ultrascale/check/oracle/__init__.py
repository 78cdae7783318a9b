"""References that the trainer is proven against, and instruments that watch both.

reference, transformers_loop   one process in float64; a loop of transformers
documents          made-up sequences that meet the edges
gathered, messages whole tensors out of parts; messages under watch
"""
