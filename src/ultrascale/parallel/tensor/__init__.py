"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022).

tensor_parallel    put on a decoder: begin here
tensor_ops         column-parallel and row-parallel products
tensor_loss        the embedding and the loss over a vocabulary that is cut
tensor_traffic, tensor_overlap   what is sent, and products beside it
"""
