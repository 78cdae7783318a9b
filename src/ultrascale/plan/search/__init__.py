"""All legal layouts of some devices, and the best of them.

space, constraints   which layouts there are; what is asked for
search, bounds       the best of them, without pricing what cannot be
replayed             memory of what is listed, from the replay
recompute_choice     which operations to keep under a budget
explain, scaling     what would change the choice; other numbers of devices
elastic              a layout for the devices that are left
"""
