"""Sharding: the part of everything that a rank holds.

places             coordinates of ranks, and their parts of weights
owners             who gets which matrix whole
context_order      positions of a sequence under context parallelism
"""
