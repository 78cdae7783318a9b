"""`ultrascale show`: runs, keys, rules, schedules, frameworks, catalogues, schemas."""
