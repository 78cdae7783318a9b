"""Weights in files of others.

huggingface        folders in and out (with stored, weight_files, tokenizer_files, folders)
convert, unpickle  pickles as safetensors, read in a confined process
"""
