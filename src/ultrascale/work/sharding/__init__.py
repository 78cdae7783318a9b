"""Sharding: the part of everything that a rank holds.

places             rank coordinates, and shards of weights
owners             owners of whole matrices (Muon)
context_order      sequence positions under context parallelism
"""
