"""Many layouts of one run, each measured here, beside what the planner says of them.

grid       settings with several values -> cells: the runs they make, and those that are refused, with the reason
cells      a cell's folder: its run, its result, what it printed
measured   one process after another that measures a cell; what is measured stays measured
held       planned beside measured: errors, order, and whether the planner's choice was the best
pictures   the two as PNGs
rows       the same as a CSV file that `ultrascale validate` reads
"""
