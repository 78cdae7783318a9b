"""The model: its dimensions, the table of its weights, and Hugging Face's `config.json` to it and back.

model              dimensions and kinds of a decoder
weights            every weight: name, shape, initial values, where it may be cut
families           each Hugging Face family in a row: what it fixes, its defaults, whether it trains
huggingface        `config.json`, read and written (with config_reader, expert_config, rope_config)
"""
