"""Rules for invalid combinations, and for what can be planned but not yet trained.

rule               a row of the tables of rules, which `ultrascale show rules` prints
run_rules          rules across sections, settings without effect, and how model and sequences can be sharded by a layout
trainable          what the trainer cannot run
time_limits        timeouts that must increase in order
"""
