"""GEMMs in fp8.

fp8_matrices       fp8 matrices and GEMMs with current scaling: begin here
fp8_linear, fp8_grouped   linear layers, delayed scaling; one GEMM per expert
"""
