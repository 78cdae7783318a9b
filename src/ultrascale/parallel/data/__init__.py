"""Data parallelism and ZeRO, by FSDP2.

data_parallel      replicas and shards: begin here
collectives        replacements for FSDP2's collectives where those do unnecessary work
reduced_buckets    frees gradients once they are reduced
gathered_matrices  gathers shards into whole matrices and back, for Muon
"""
