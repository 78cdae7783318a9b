"""One lesson per file: variants of one computation."""
