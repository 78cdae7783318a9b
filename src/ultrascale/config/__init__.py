"""Resolution of files, presets and flags into a run; all mistakes in them are reported at once.

resolve            the resolution, in order; a resolved run as text
layers, schema     values with their sources; keys and types
choices, ranges    values that a setting may have; rules: invalid combinations
reference          every key in one line
"""
