"""Expert parallelism.

expert_parallel    applies it to a decoder: begin here
expert_dispatch    sends tokens to their experts' ranks, and results back
expert_sequences   limited expert capacity
"""
