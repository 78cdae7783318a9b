"""Files that are dropped on the page."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
RUN = """
cluster = "8xh100"
[model]
preset = "llama-3-8b"
[batch]
sequence_length = 4096
sequences_per_batch = 64
[layout]
dp = 4
tp = 2
zero_stage = 1
precision = "bf16"
"""
