"""Models known by name, so that planning needs no network. Numbers are those of the published `config.json` of the base model.

Sources: the Hugging Face repositories of openai-community, meta-llama, HuggingFaceTB, Qwen and mistralai; GPT-3: Brown et al.
2020, table 2.1; Megatron: Korthikanti et al. 2022, "Reducing Activation Recomputation", table 3 (sequence 2048, vocabulary
51,200). GPT-3 and Megatron are GPT-2 in shape: their sparse attention patterns and untold details are not modelled.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from ultrascale.spec.expert_presets import EXPERT_PRESETS
from ultrascale.spec.model import Model, RopeScaling
from ultrascale.spec.problems import Problem, SpecError

_GPT2 = Model(
    vocab_size=50257, hidden_size=0, intermediate_size=0, num_hidden_layers=0, num_attention_heads=0, num_key_value_heads=0,
    head_dim=0, max_position_embeddings=1024, model_type="gpt2", norm="layernorm", gated_mlp=False,
    position_embedding="learned", qkv_bias=True, attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True,
)  # fmt: skip
_LLAMA = replace(_GPT2, model_type="llama", norm="rmsnorm", gated_mlp=True, position_embedding="rotary", qkv_bias=False,
                 attention_output_bias=False, mlp_bias=False, tie_word_embeddings=False)  # fmt: skip
_LLAMA_3_1 = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA_3_2 = replace(_LLAMA_3_1, factor=32.0)

#    name               vocabulary hidden  layers heads positions
_GPT2_SIZES = """
     gpt2-small              50257    768     12    12     1024
     gpt2-medium             50257   1024     24    16     1024
     gpt2-large              50257   1280     36    20     1024
     gpt2-xl                 50257   1600     48    25     1024
     gpt-3-175b              50257  12288     96    96     2048
     megatron-22b            51200   6144     48    64     2048
     megatron-530b           51200  20480    105   128     2048
     megatron-1t             51200  25600    128   160     2048
     tiny-gpt2                2048    128      2     4      512
"""

#    name               vocabulary hidden    ffn layers heads kv head_dim positions  theta
_LLAMA_SIZES = """
     llama-2-7b              32000   4096  11008     32    32 32      128      4096  1e4
     llama-2-13b             32000   5120  13824     40    40 40      128      4096  1e4
     llama-2-70b             32000   8192  28672     80    64  8      128      4096  1e4
     llama-3-8b             128256   4096  14336     32    32  8      128      8192  5e5
     llama-3-70b            128256   8192  28672     80    64  8      128      8192  5e5
     llama-3.1-8b           128256   4096  14336     32    32  8      128    131072  5e5
     llama-3.1-70b          128256   8192  28672     80    64  8      128    131072  5e5
     llama-3.1-405b         128256  16384  53248    126   128  8      128    131072  5e5
     llama-3.2-1b           128256   2048   8192     16    32  8       64    131072  5e5
     llama-3.2-3b           128256   3072   8192     28    24  8      128    131072  5e5
     smollm-135m             49152    576   1536     30     9  3       64      2048  1e4
     smollm-360m             49152    960   2560     32    15  5       64      2048  1e4
     smollm-1.7b             49152   2048   8192     24    32 32       64      2048  1e4
     smollm2-135m            49152    576   1536     30     9  3       64      8192  1e5
     smollm2-360m            49152    960   2560     32    15  5       64      8192  1e5
     smollm2-1.7b            49152   2048   8192     24    32 32       64      8192  1.3e5
     smollm3-3b             128256   2048  11008     36    16  4      128     65536  5e6
     qwen2.5-0.5b           151936    896   4864     24    14  2       64     32768  1e6
     qwen2.5-1.5b           151936   1536   8960     28    12  2      128    131072  1e6
     qwen2.5-3b             151936   2048  11008     36    16  2      128     32768  1e6
     qwen2.5-7b             152064   3584  18944     28    28  4      128    131072  1e6
     qwen2.5-14b            152064   5120  13824     48    40  8      128    131072  1e6
     qwen2.5-32b            152064   5120  27648     64    40  8      128    131072  1e6
     qwen2.5-72b            152064   8192  29568     80    64  8      128    131072  1e6
     qwen3-0.6b             151936   1024   3072     28    16  8      128     40960  1e6
     qwen3-1.7b             151936   2048   6144     28    16  8      128     40960  1e6
     qwen3-4b               151936   2560   9728     36    32  8      128     40960  1e6
     qwen3-8b               151936   4096  12288     36    32  8      128     40960  1e6
     qwen3-14b              151936   5120  17408     40    40  8      128     40960  1e6
     qwen3-32b              151936   5120  25600     64    64  8      128     40960  1e6
     mistral-7b-v0.1         32000   4096  14336     32    32  8      128     32768  1e4
     mistral-7b-v0.3         32768   4096  14336     32    32  8      128     32768  1e6
     tiny-llama               2048    128    384      2     4  2       32      1024  1e4
     tiny-llama-4m            4096    256    768      4     4  2       64      2048  1e4
     tiny-mistral             2048    128    384      2     4  2       32      1024  1e4
     tiny-qwen2               2048    128    384      2     4  2       32      1024  1e4
     tiny-qwen3               2048    128    384      2     4  2       32      1024  1e4
     tiny-smollm3             2048    128    384      4     4  2       32      1024  1e4
     bench-llama              8192    256    768      4     4  4       64       256  1e4
"""

# What a family, or one size of it, does differently from Llama; a later line that matches wins.
_DIFFERENCES: list[tuple[str, dict]] = [
    ("llama-3.1", {"rope_scaling": _LLAMA_3_1}),
    ("llama-3.2", {"rope_scaling": _LLAMA_3_2, "tie_word_embeddings": True}),
    ("smollm", {"tie_word_embeddings": True}),
    ("smollm2-135m", {"initializer_range": 1 / 24}),
    ("smollm3", {"model_type": "smollm3", "norm_eps": 1e-6, "no_rope_layer_interval": 4}),
    ("qwen2.5", {"model_type": "qwen2", "norm_eps": 1e-6, "qkv_bias": True}),
    ("qwen2.5-0.5b", {"tie_word_embeddings": True}),
    ("qwen2.5-1.5b", {"tie_word_embeddings": True}),
    ("qwen2.5-3b", {"tie_word_embeddings": True}),
    ("qwen2.5-14b", {"norm_eps": 1e-5}),
    ("qwen2.5-32b", {"norm_eps": 1e-5}),
    ("qwen2.5-72b", {"norm_eps": 1e-5}),
    ("qwen3", {"model_type": "qwen3", "norm_eps": 1e-6, "qk_norm": True}),
    ("qwen3-0.6b", {"tie_word_embeddings": True}),
    ("qwen3-1.7b", {"tie_word_embeddings": True}),
    ("qwen3-4b", {"tie_word_embeddings": True}),
    ("mistral-7b", {"model_type": "mistral"}),
    ("mistral-7b-v0.1", {"sliding_window": 4096}),
    ("tiny", {"tie_word_embeddings": True}),
    ("tiny-mistral", {"model_type": "mistral", "sliding_window": 64, "tie_word_embeddings": False}),
    ("tiny-qwen2", {"model_type": "qwen2", "qkv_bias": True}),
    ("tiny-qwen3", {"model_type": "qwen3", "qk_norm": True}),
    ("tiny-smollm3", {"model_type": "smollm3", "no_rope_layer_interval": 4}),
]

# Short names that people use.
ALIASES = {"gpt2": "gpt2-small", "gpt3-175b": "gpt-3-175b", "mistral-7b": "mistral-7b-v0.3",
           "olmoe": "olmoe-1b-7b", "kimi-k2-1t": "kimi-k2", "grok-1-314b": "grok-1"}  # fmt: skip


def preset(name: str) -> Model:
    """The model called `name`, in any case. Raises SpecError with the nearest names."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in PRESETS:
        near = get_close_matches(key, [*PRESETS, *ALIASES], n=3, cutoff=0.5)
        remedy = f"Did you mean {' or '.join(near)}? " if near else ""
        rule = f"there is no model called {name!r}"
        raise SpecError([Problem("model.preset", rule, f"{remedy}`ultrascale show models` lists them all.")])
    return PRESETS[key]


def _gpt2(name: str, vocabulary: str, hidden: str, layers: str, heads: str, positions: str) -> Model:
    return replace(
        _GPT2, name=name, vocab_size=int(vocabulary), hidden_size=int(hidden), intermediate_size=4 * int(hidden),
        num_hidden_layers=int(layers), num_attention_heads=int(heads), num_key_value_heads=int(heads),
        head_dim=int(hidden) // int(heads), max_position_embeddings=int(positions),
    )  # fmt: skip


def _llama(
    name: str,
    vocabulary: str,
    hidden: str,
    ffn: str,
    layers: str,
    heads: str,
    kv: str,
    head_dim: str,
    positions: str,
    theta: str,
) -> Model:
    differences = {}
    for prefix, fields in _DIFFERENCES:
        if name.startswith(prefix):
            differences.update(fields)
    return replace(
        _LLAMA, name=name, vocab_size=int(vocabulary), hidden_size=int(hidden), intermediate_size=int(ffn),
        num_hidden_layers=int(layers), num_attention_heads=int(heads), num_key_value_heads=int(kv), head_dim=int(head_dim),
        max_position_embeddings=int(positions), rope_theta=float(theta), **differences,
    )  # fmt: skip


def _table(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


PRESETS: dict[str, Model] = {row[0]: _gpt2(*row) for row in _table(_GPT2_SIZES)}
PRESETS |= {row[0]: _llama(*row) for row in _table(_LLAMA_SIZES)}
PRESETS |= EXPERT_PRESETS
