"""The head and its loss, without all logits at once.

cross_entropy      rows a chunk at a time; cross_entropy_columns a slab of the vocabulary
triton_loss        the loss of rows in Triton
"""
