"""Activation memory: activation checkpointing (recomputation), offloading to the host, and chunked feed-forward layers.

recompute, remade  activation recomputation (checkpointing): blocks, modules, single results
offload, host_memory   activations that wait in the host's memory
partitioned_checkpoints   a block's input cut over tp
mlp_chunks         the feed-forward layer a piece of the sequence at a time
"""
