"""Data parallelism and ZeRO, by FSDP2.

data_parallel      replicas and shards: begin here
collectives        FSDP2's collectives, where its own do more than is needed
reduced_buckets    gradients let go of once they are reduced
whole_matrices     shards to whole matrices and back, for Muon
"""
