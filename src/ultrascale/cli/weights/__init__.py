"""Verbs of checkpoints and weights: `checkpoint`, `export`, `import`, `convert`, `generate`."""
