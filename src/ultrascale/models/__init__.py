"""The decoder, its initial values, Hugging Face import and export, and generation. Contains no distributed code."""
