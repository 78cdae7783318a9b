"""The head and its loss, computed without materialising all logits.

cross_entropy      by chunks of rows; cross_entropy_columns by slabs of the vocabulary
triton_loss        the loss of rows in Triton
"""
