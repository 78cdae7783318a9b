"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022).

tensor_parallel    applies it to a decoder: begin here
tensor_ops         column-parallel and row-parallel products
tensor_loss        embedding and loss with the vocabulary sharded
tensor_traffic, tensor_overlap   communication, and GEMMs overlapped with it
"""
