"""`ultrascale show`: what is known: runs, keys, schedules, stacks, schemas."""
