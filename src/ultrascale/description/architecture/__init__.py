"""The model: its dimensions, the table of its weights, and conversion to and from Hugging Face's `config.json`.

model              dimensions and kinds of a decoder
weights            every weight: name, shape, initial values, how it may be sharded
families           one row per Hugging Face family: what it fixes, its defaults, whether it trains
huggingface        `config.json`, read and written (with config_reader, expert_config, rope_config)
"""
