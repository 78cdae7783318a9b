"""What is trained, on what, cut how. Plain data: no torch, and nothing of ours but this package.

run                a run: all settings, section by section, with defaults and what each means
resolve            a run from a TOML file and flags, and every mistake in them told at once
launch             how a run is started on a cluster, which decides nothing of it
model, layout      the two sections that decide most; presets of models are in model_presets
cluster            a machine: accelerators and links; the catalogue is in machines and accelerators
weights            the table of all weights of a model
work               the table of all operations of a block, with what they compute, save and send
places             which part of a weight a rank holds
rules, trainable   what does not go together; what can be planned but not yet trained
units              numbers as people write them
"""
