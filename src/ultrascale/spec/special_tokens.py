"""What common tokenizers call the tokens around a document. In the order in which they are looked for."""

from __future__ import annotations

END_OF_DOCUMENT = "<|endoftext|>"
"""GPT-2's, and that of tokenizers trained here."""
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eod|>")
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
