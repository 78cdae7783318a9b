"""Names of the tokens around a document in common tokenizers, in the order in which they are looked up."""

from __future__ import annotations

END_OF_DOCUMENT = "<|endoftext|>"
"""GPT-2's, and that of tokenizers trained here."""
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eod|>")
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
