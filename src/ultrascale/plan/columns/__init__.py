"""Memory of whole tables of layouts at once, for the search: blocks replayed once per shape, counted from action lists.

footprint                     the whole, begin here; and the allocator's share
rank_state, fp8_state         weights, gradients, optimizer
block_memory                  what one block keeps
rank_loads, rank_activations  how many blocks a rank holds; their bytes
rank_moments                  where in a step the sum is highest
"""
