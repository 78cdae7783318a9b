"""A run as plain data: model, data, machines and layout. Imports neither torch nor any other package of ultrascale.

run                a run: all settings by section, with defaults and descriptions
layout             the parallel layout of its processes; recomputed: names of recomputation modes
schedules          facts of every pipeline schedule, one row each
architecture       the model: dimensions, weights, and conversion to and from `config.json`
sections           `[launch]`, trackers, `[islands]`
progress           the sequences of each step
units, problems    parsing and printing of numbers with units; problems, collected and reported together
"""
