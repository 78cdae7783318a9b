"""Text to tokens to batches. NumPy only: no torch.

prepare            text files to a folder of token shards and a manifest
documents, shards  documents out of files; one shard from start to end
tokenizer          text to ids
corpus, indexed    the tokens of a prepared folder; Megatron's pair of files
verify             whether shards still hold what was prepared
loader, order      the sequence with a global number, as a pure function of seed and number
"""
