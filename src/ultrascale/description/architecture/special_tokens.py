"""Names of the tokens around a document in common tokenizers, in lookup order."""

from __future__ import annotations

END_OF_DOCUMENT = "<|endoftext|>"
"""Name in GPT-2, and in tokenizers trained by this package."""
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eod|>")
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
