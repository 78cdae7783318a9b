"""Rules for invalid combinations, and for what can be planned but not yet trained.

rule               a row of the tables of rules, which `ultrascale show rules` prints
run_rules          rules across sections, settings without effect, and whether model and sequences can be cut as a layout says
trainable          what the trainer cannot run
time_limits        limits that must stand in order
"""
