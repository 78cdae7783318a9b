"""Expert parallelism.

expert_parallel    put on a decoder: begin here
expert_dispatch    tokens to their experts' ranks, and back
expert_rows, expert_sequences   order of rows; limited capacity
"""
