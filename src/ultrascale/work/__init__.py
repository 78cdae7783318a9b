"""Every operation of the model on one rank of a layout: its FLOPs, results, saved tensors and communication.

work               the table of a block's operations, with those of attention_work and mlp_work
ops, op_builders   the operation type; builders for GEMMs, norms and sums
recompute          what a block saves from forward to backward, under any recomputation
fp8_slots          amax histories of delayed scaling
sharding           the part of everything that a rank holds
"""
