"""Verbs for checkpoints and weights: `checkpoint`, `export`, `import`, `convert`, `generate`, `evaluate`."""
