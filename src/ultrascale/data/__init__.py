"""Text to tokens to batches. NumPy only: no torch."""
