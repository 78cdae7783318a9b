"""Models known by name, so that planning needs no network.

model_presets   the presets of `catalogue/models.toml`, and how a name is looked up
model_table     how that file is read
model_names     how people and hubs write names
"""
