"""Mixed precision and fp8, put on a model.

mixed_precision    fp32 parameters and bf16 copies
fp8_products       the products of blocks in fp8 (with fp8_gather, fp8_history, fp8_wires)
"""
