"""Models known by name, so that planning needs no network.

model_presets      the presets, and how a name is looked up
expert_presets, planned_presets   those with experts; those of families that are planned only
model_names        how people and hubs write names
"""
