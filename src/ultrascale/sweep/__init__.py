"""Measures many layouts of one run on this machine, and compares them with the planner.

grid       settings with several values -> cells: the resulting runs, and refused ones with the reason
cells      a cell's folder: its run, its result, its output
measured   measures cells one after the other, each in a process; measured cells are not measured again
accuracy   planned against measured: errors, ranking, and the regret of the planner's choice
pictures   the comparison as PNGs
rows       the comparison as a CSV file that `ultrascale validate` reads
"""
