"""Observers of steps. They take no part in the computation, except to refuse a step and to move the biases of experts.

metrics, performance   rows, lines and events; speed and memory beside the plan
anomalies, repeat, digests   steps that cannot be right; arithmetic that went wrong; ranks that differ
stragglers         slow ranks
noise_scale, expert_balance   the gradient noise scale; the load of experts
profile            chosen steps under torch's profiler
"""
