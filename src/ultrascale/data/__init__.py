"""Text to tokens to batches. NumPy only: no torch.

preparing          text files to a folder of token shards and a manifest
reading            documents read from files
tokenizer          text to ids
corpus, indexed    the tokens of a prepared folder; Megatron's pair of files
loader             the sequence with a global number, as a pure function of seed and number
"""
