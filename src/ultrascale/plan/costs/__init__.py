"""Costs of a training run beyond its steps.

stops      failures of machines: rate, interval of saves, spare nodes, goodput
storage    size of checkpoints, and time to write them
budget     training that money or time buys
cost       energy and money of a training run
"""
