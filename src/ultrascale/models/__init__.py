"""The decoder, its initial values, Hugging Face folders in and out, and generation. Knows nothing of ranks."""
