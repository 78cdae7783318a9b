"""Memory of whole tables of layouts at once, for the search: blocks replayed once per shape, times counts from action lists.

footprint                     total memory, begin here; and the allocator's share
rank_state, fp8_state         weights, gradients, optimizer state
block_memory                  memory of one block (by plan.memory.block_walk)
rank_loads, rank_activations  number of blocks whose activations a rank holds; their bytes
rank_moments                  the moments of a step at which memory can peak
"""
