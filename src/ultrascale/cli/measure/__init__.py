"""Verbs that measure: `measure step|speed|network`, `sweep`."""
