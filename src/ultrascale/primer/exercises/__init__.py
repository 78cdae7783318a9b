"""A lesson a file: variants of one computation."""
