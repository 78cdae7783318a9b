"""Presets of known models, so that planning needs no network.

model_presets   the presets of `catalogue/models.toml`, and the lookup of names
model_table     reader of that file
model_names     spellings of names by people and hubs
"""
