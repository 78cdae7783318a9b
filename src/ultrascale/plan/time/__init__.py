"""Seconds of a step, for whole tables of layouts at once.

price                         prices many layouts: step time by part, and memory; begin here
blocks, passes                seconds of one block; of one micro-batch on one rank
stages, stage_cut             layers and parameters of every rank of a pipeline
data_traffic, offload         data parallelism and ZeRO; copies to the host
step_parts, recompute_prices  a step by parts; seconds that recomputation adds
"""
