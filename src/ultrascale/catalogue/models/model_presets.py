"""Models known by name, so that planning needs no network. Numbers are those of the published `config.json` of the base model.

Sources: the Hugging Face repositories of openai-community, meta-llama, HuggingFaceTB, Qwen, mistralai, allenai and google;
GPT-3: Brown et al. 2020, table 2.1; Megatron: Korthikanti et al. 2022, "Reducing Activation Recomputation", table 3 (sequence
2048, vocabulary 51,200); OPT: Zhang et al. 2022, table 1; BLOOM: Le Scao et al. 2022; LLaMA: Touvron et al. 2023; 01-ai,
microsoft. GPT-3, OPT, BLOOM and Megatron are GPT-2 in shape: sparse attention, ALiBi (positions instead, 0.02 percent of
BLOOM's weights), ReLU and untold details are not modelled. GPT-3 1.3B and 13B have a whole number of heads, and a width that
they divide. Qwen 3's positions are those of its tuned models (base: 32,768).
"""

from __future__ import annotations

import math
from dataclasses import replace
from difflib import get_close_matches

from ultrascale.catalogue.models.expert_presets import EXPERT_PRESETS
from ultrascale.catalogue.models.model_names import normal_name, told_size
from ultrascale.catalogue.models.planned_presets import PLANNED_PRESETS
from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.problems import mistake

NEAREST = 3
"""Names that a wrong one is answered with."""

_GPT2 = Model(
    vocab_size=50257, hidden_size=0, intermediate_size=0, num_hidden_layers=0, num_attention_heads=0, num_key_value_heads=0,
    head_dim=0, max_position_embeddings=1024, model_type="gpt2", norm="layernorm", gated_mlp=False,
    position_embedding="learned", qkv_bias=True, attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True,
)  # fmt: skip
_LLAMA = replace(_GPT2, model_type="llama", norm="rmsnorm", gated_mlp=True, position_embedding="rotary", qkv_bias=False,
                 attention_output_bias=False, mlp_bias=False, tie_word_embeddings=False)  # fmt: skip
_OLMO_2 = {"model_type": "olmo2", "norm_placement": "post", "qk_norm": True, "qk_norm_whole": True}
_GEMMA_3 = {
    "model_type": "gemma3_text", "norm_eps": 1e-6, "norm_placement": "both", "zero_centered_norm": True,
    "scale_embedding": True, "hidden_act": "gelu_pytorch_tanh", "qk_norm": True, "tie_word_embeddings": True,
    "rope_local_base_freq": 1e4, "sliding_window": 1024, "full_attention_interval": 6,
}  # fmt: skip
_LLAMA_3_1 = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA_3_2 = replace(_LLAMA_3_1, factor=32.0)

#    name               vocabulary hidden  layers heads positions
_GPT2_SIZES = """
     gpt2-small              50257    768     12    12     1024
     gpt2-medium             50257   1024     24    16     1024
     gpt2-large              50257   1280     36    20     1024
     gpt2-xl                 50257   1600     48    25     1024
     gpt-3-125m              50257    768     12    12     2048
     gpt-3-350m              50257   1024     24    16     2048
     gpt-3-760m              50257   1536     24    16     2048
     gpt-3-1.3b              50257   2048     24    16     2048
     gpt-3-2.7b              50257   2560     32    32     2048
     gpt-3-6.7b              50257   4096     32    32     2048
     gpt-3-13b               50257   5120     40    40     2048
     gpt-3-175b              50257  12288     96    96     2048
     opt-1.3b                50272   2048     24    32     2050
     opt-6.7b                50272   4096     32    32     2050
     opt-13b                 50272   5120     40    40     2050
     opt-30b                 50272   7168     48    56     2050
     opt-66b                 50272   9216     64    72     2050
     opt-175b                50272  12288     96    96     2050
     bloom-176b             250880  14336     70   112     2048
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
     llama-30b               32000   6656  17920     60    52 52      128      2048  1e4
     llama-65b               32000   8192  22016     80    64 64      128      2048  1e4
     yi-34b                  64000   7168  20480     60    56  8      128      4096  5e6
     phi-3-mini              32064   3072   8192     32    32 32       96      4096  1e4
     phi-4                  100352   5120  17920     40    40 10      128     16384  2.5e5
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
     mistral-7b-v0.2         32000   4096  14336     32    32  8      128     32768  1e6
     mistral-7b-v0.3         32768   4096  14336     32    32  8      128     32768  1e6
     mistral-nemo-12b       131072   5120  14336     40    32  8      128    131072  1e6
     mistral-small-24b      131072   5120  32768     40    32  8      128     32768  1e8
     mistral-large-2         32768  12288  28672     88    96  8      128    131072  1e6
     olmo-2-1b              100352   2048   8192     16    16 16      128      4096  5e5
     olmo-2-7b              100352   4096  11008     32    32 32      128      4096  5e5
     olmo-2-13b             100352   5120  13824     40    40 40      128      4096  5e5
     olmo-2-32b             100352   5120  27648     64    40  8      128      4096  5e5
     gemma-3-1b             262144   1152   6912     26     4  1      256     32768  1e6
     gemma-3-4b             262208   2560  10240     34     8  4      256    131072  1e6
     gemma-3-12b            262208   3840  15360     48    16  8      256    131072  1e6
     gemma-3-27b            262208   5376  21504     62    32 16      128    131072  1e6
     tiny-llama               2048    128    384      2     4  2       32      1024  1e4
     tiny-llama-4m            4096    256    768      4     4  2       64      2048  1e4
     tiny-mistral             2048    128    384      2     4  2       32      1024  1e4
     tiny-qwen2               2048    128    384      2     4  2       32      1024  1e4
     tiny-qwen3               2048    128    384      2     4  2       32      1024  1e4
     tiny-smollm3             2048    128    384      4     4  2       32      1024  1e4
     tiny-olmo2               2048    128    384      2     4  2       32      1024  1e4
     tiny-gemma3-text         2048    128    384      3     4  2       32      1024  1e6
     bench-llama              8192    256    768      4     4  4       64       256  1e4
"""

# What a family, or one size of it, does differently from Llama; a later line that matches wins.
_DIFFERENCES: list[tuple[str, dict]] = [
    ("llama-30b", {"norm_eps": 1e-6}),
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
    ("mistral", {"model_type": "mistral"}),
    ("olmo-2", _OLMO_2 | {"norm_eps": 1e-6}),
    ("gemma-3", _GEMMA_3 | {"rope_scaling": RopeScaling("linear", 8.0, 131072)}),
    ("gemma-3-1b", {"rope_scaling": None, "sliding_window": 512}),
    ("gemma-3-27b", {"query_pre_attn_scalar": 168}),
    ("mistral-7b-v0.1", {"sliding_window": 4096}),
    ("tiny", {"tie_word_embeddings": True}),
    ("tiny-mistral", {"model_type": "mistral", "sliding_window": 64, "tie_word_embeddings": False}),
    ("tiny-qwen2", {"model_type": "qwen2", "qkv_bias": True}),
    ("tiny-qwen3", {"model_type": "qwen3", "qk_norm": True}),
    ("tiny-olmo2", _OLMO_2 | {"tie_word_embeddings": False}),
    (
        "tiny-gemma3-text",
        _GEMMA_3
        | {
            "rope_scaling": RopeScaling("linear", 8.0, 1024),
            "sliding_window": 64,
            "full_attention_interval": 2,
            "query_pre_attn_scalar": 24,
        },
    ),
    ("tiny-smollm3", {"model_type": "smollm3", "no_rope_layer_interval": 4}),
]

# Short names that people use. Without a version the newest release of the size is meant: Mistral 7B's window is v0.1's alone,
# and llama-7b and -13b are Llama 2's (the first had 2,048 positions).
ALIASES = {
    "gpt2": "gpt2-small", "gpt-2": "gpt2-small", "gpt3-175b": "gpt-3-175b", "gpt-3": "gpt-3-175b",
    "mistral-7b": "mistral-7b-v0.3", "mistral-nemo": "mistral-nemo-12b",
    "olmoe": "olmoe-1b-7b", "kimi-k2-1t": "kimi-k2", "grok-1-314b": "grok-1", "llama-7b": "llama-2-7b",
    "llama-13b": "llama-2-13b", "llama-33b": "llama-30b", "llama-3.3-70b": "llama-3.1-70b", "llama-3-405b": "llama-3.1-405b",
    "mixtral": "mixtral-8x7b", "mixtral-8x7b-v0.1": "mixtral-8x7b", "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "bloom": "bloom-176b", "mt-nlg-530b": "megatron-530b", "mt-nlg": "megatron-530b", "megatron-turing-530b": "megatron-530b",
    "dbrx-132b": "dbrx", "gpt-neox": "gpt-neox-20b", "deepseek-v3-671b": "deepseek-v3", "deepseek-671b": "deepseek-v3",
    "deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3", "deepseek-v2-236b": "deepseek-v2",
    "smollm-3-3b": "smollm3-3b", "phi-3-mini-4k": "phi-3-mini", "olmo-2-0425-1b": "olmo-2-1b",
    "olmo-2-1124-7b": "olmo-2-7b", "olmo-2-1124-13b": "olmo-2-13b", "olmo-2-0325-32b": "olmo-2-32b",
}  # fmt: skip


def preset(name: str) -> Model:
    """The model called `name`, as people and hubs write it (`catalogue.models.model_names`). Raises SpecError with the nearest
    names."""
    for key in (name.strip().lower(), normal_name(name)):
        key = ALIASES.get(key, key)
        if key in PRESETS:
            return PRESETS[key]
    raise mistake("model.preset", *_unknown(name))


def _unknown(name: str) -> tuple[str, str]:
    """The fault of a name, and a remedy."""
    everything = "`ultrascale show models` lists them all."
    if "/" in name and (name.startswith((".", "/", "~")) or name.endswith((".json", "/"))):
        return f"there is no file or folder {name!r}", "Give a folder that holds a config.json, or a preset's name."
    if size := told_size(name):
        sizes = {
            model.name: num_parameters(model) for model in PRESETS.values() if not model.name.startswith(("tiny", "bench"))
        }
        near = sorted(sizes, key=lambda key: abs(math.log(sizes[key] / size)))[:NEAREST]
        words = ", ".join(f"{key} ({sizes[key] / 1e9:.3g}B)" for key in near)
        return f"{name!r} is a size, which many shapes have", f"Name one: {words}; or give a config.json. {everything}"
    key = normal_name(name)
    near = get_close_matches(key, [*PRESETS, *ALIASES], n=NEAREST, cutoff=0.5)
    remedy = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"there is no model called {name!r}", f"{remedy}Or give the folder of its config.json; {everything}"


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
PRESETS |= EXPERT_PRESETS | PLANNED_PRESETS
