"""How a layout is put on a model: one file per axis, and `apply`, which says in which order."""
