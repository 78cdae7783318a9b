"""Costs of a training beyond its steps.

stops      failures of machines: how often, how far saves stand apart, spare nodes, goodput
storage    what checkpoints take, and how long they are written
budget     what money or time buys
"""
