"""Import and export of foreign weight files.

huggingface        Hugging Face folders, import and export (with stored, weight_files, tokenizer_files, folders)
convert, unpickle  converts pickles to safetensors, in a confined process
"""
