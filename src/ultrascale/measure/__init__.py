"""What really happens on this machine: live memory, its ceilings, and the plan held against them."""
