"""Activation memory: activation checkpointing (recomputation), offloading to the host, and chunked feed-forward layers.

recompute, regions  activation recomputation (checkpointing): blocks, modules, single results
offload, host_memory   activations offloaded to host memory
partitioned_checkpoints   block inputs sharded over tp
mlp_chunks         the feed-forward layer computed in pieces of the sequence
"""
