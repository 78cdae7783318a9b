"""Every operation of the model: FLOPs, what it makes, saves and sends, on one rank of a layout.

work               the table of a block's operations, with those of attention_work and mlp_work
ops, op_builders   what an operation is; how products, norms and sums are written
recompute          what a block keeps from forward to backward, under any recomputation
fp8_slots          histories of delayed scaling
sharding           which part of what a rank holds
"""
