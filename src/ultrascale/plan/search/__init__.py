"""Search over all legal layouts of a number of devices for the best.

space, constraints   enumerates legal layouts; explains requested values that no layout has
search, bounds       ranks layouts; lower bounds skip those that cannot matter
replayed             memory of listed layouts, from the replay
recompute_choice     which operations to recompute under a memory budget
explain, scaling     why this layout, and what would change it; other numbers of devices
elastic              a layout for the remaining devices
"""
