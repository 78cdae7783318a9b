"""Observers of steps. They do not change the computation, except to refuse a step and to update the experts' biases.

metrics, performance   rows, lines and events; speed and memory against the plan
anomalies, repeat, digests   anomalous steps; wrong arithmetic; replicas that differ
stragglers         slow ranks
noise_scale, expert_balance   the gradient noise scale; the load of experts
profile            chosen steps under torch's profiler
"""
