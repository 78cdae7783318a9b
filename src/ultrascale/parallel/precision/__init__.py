"""Mixed precision and fp8, applied to a model.

mixed_precision    fp32 parameters and bf16 copies
fp8_products       fp8 GEMMs of blocks (with fp8_gather, fp8_history, fp8_wires)
"""
