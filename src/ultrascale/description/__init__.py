"""A run as plain data: what is trained, on what, cut how. No torch, and nothing of ours but this package.

run                a run: all settings, section by section, with defaults and what each means
layout             how it is cut over its processes; recomputed has the words of recomputation
schedules          facts of every pipeline schedule, a row each
architecture       the model: its dimensions, its weights, and `config.json` to and from it
sections           `[launch]`, trackers, `[islands]`
progress           which sequences a step sees
units, problems    numbers as people write them; mistakes, told all at once
"""
