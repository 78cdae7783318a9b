"""Expert parallelism.

expert_parallel    applies it to a decoder: begin here
expert_dispatch    sends tokens to their experts' ranks, and results back
expert_rows, expert_sequences   order of rows; limited expert capacity
"""
