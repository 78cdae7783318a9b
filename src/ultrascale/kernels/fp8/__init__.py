"""Products in 8-bit floats.

fp8_matrices       matrices and products with current scaling: begin here
fp8_linear, fp8_grouped   linear layers, delayed scaling; a product per expert
"""
