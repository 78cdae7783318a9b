"""Resolution of files, presets and flags into a run, with every mistake in them reported at once.

resolve            all of it, in order; a resolved run as text
layers, schema     what was written where; keys and types
ranges, rules      what one value can be; what does not go together
reference          every key in a line
"""
