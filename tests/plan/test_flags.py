"""Plans as settings of trainers: what is printed says the same layout, and can be read."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS, preset
from ultrascale.catalogue.stacks.stack import with_optimizer
from ultrascale.catalogue.stacks.stack_files import STACKS, changed_stack, stack_file
from ultrascale.config.resolve import resolve
from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.flags.trainers import cannot_express, not_searched, trainer_flags
from ultrascale.plan.search.space import legal_layouts
from ultrascale.plan.workload import Workload


def workload(stack: str, model: str = "llama-3-8b") -> Workload:
    return Workload(preset(model), parse_cluster("64xh100"), 8192, 512, STACKS[stack])


def megatron_words(text: str) -> dict[str, str]:
    """What the printed script hands to torchrun: run by bash, with a torchrun that prints its arguments."""
    script = f"""torchrun() {{ printf '%s\\n' "$@"; }}\n{text}\n"""
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={}).stdout.splitlines()
    words: dict[str, str] = {}
    for word in said[said.index("pretrain_gpt.py") + 1 :]:
        if word.startswith("--"):
            words[name := word[2:]] = ""
        else:
            words[name] = f"{words[name]} {word}".strip()
    return words


PIPED = Layout(
    dp=4, tp=4, pp=4, schedule="interleaved", virtual_stages=2, micro_batch_size=2, zero_stage=1, precision="bf16",
    recompute="selective",
)  # fmt: skip


def test_megatron_gets_its_arguments() -> None:
    words = megatron_words(trainer_flags(workload("megatron"), PIPED))
    assert (words["attention-dropout"], words["hidden-dropout"]) == ("0.0", "0.0")  # Megatron would take 0.1
    wanted = {
        "tensor-model-parallel-size": "4", "pipeline-model-parallel-size": "4", "num-virtual-stages-per-pipeline-rank": "2",
        "micro-batch-size": "2", "global-batch-size": "512", "seq-length": "8192", "num-layers": "32", "num-query-groups": "8",
        "recompute-granularity": "selective",
    }  # fmt: skip
    assert {name: words[name] for name in wanted} == wanted
    assert {"sequence-parallel", "use-distributed-optimizer", "bf16", "swiglu", "untie-embeddings-and-output-weights"} <= set(
        words
    )
    assert "num-experts" not in words and "fp16" not in words and "cp-comm-type" not in words


def test_megatron_gets_the_modules_it_has_names_for() -> None:
    words = megatron_words(trainer_flags(workload("megatron"), replace(PIPED, recompute="core_attn+norm")))
    assert (words["recompute-granularity"], words["recompute-modules"]) == ("selective", "layernorm core_attn")
    (problem,) = cannot_express(workload("megatron"), replace(PIPED, recompute="norm+mlp_act"))
    assert problem.key == "layout.recompute" and "mla_up_proj" in problem.rule
    assert not cannot_express(workload("ultrascale"), replace(PIPED, recompute="norm+mlp_act"))


def test_megatron_gets_rings_of_ranks_that_swap_heads() -> None:
    """Megatron-LM's --hierarchical-context-parallel-sizes: the group of the all-to-all first, that of the ring second."""
    layout = Layout(dp=4, cp=16, cp_method="ring+all-to-all", cp_heads=8, zero_stage=1, precision="bf16")
    words = megatron_words(trainer_flags(workload("megatron"), layout))
    assert (words["cp-comm-type"], words["hierarchical-context-parallel-sizes"]) == ("a2a+p2p", "8 2")
    assert "hierarchical-context-parallel-sizes" not in trainer_flags(
        workload("megatron"), Layout(dp=4, cp=16, precision="bf16")
    )


def test_megatron_gets_experts_and_latent_attention() -> None:
    layout = Layout(dp=64, ep=8, zero_stage=1, precision="bf16")
    words = megatron_words(trainer_flags(workload("megatron", "mixtral-8x7b"), layout))
    assert (words["num-experts"], words["moe-router-topk"], words["expert-model-parallel-size"]) == ("8", "2", "8")
    assert words["moe-layer-freq"] == "([0]*0+[1]*32)"
    latent = megatron_words(trainer_flags(workload("megatron", "deepseek-v3"), layout))
    assert "multi-latent-attention" in latent and latent["kv-lora-rank"] == "512" and "num-query-groups" not in latent


def test_torchtitan_gets_toml_whose_degrees_multiply_to_the_devices() -> None:
    layout = Layout(
        dp=16, dp_shard=8, pp=4, schedule="zb-v", virtual_stages=2, zero_stage=1, micro_batch_size=2, precision="bf16"
    )
    read = tomllib.loads(trainer_flags(workload("torchtitan"), layout))
    own = read["parallelism"]
    assert own["data_parallel_replicate_degree"] * own["data_parallel_shard_degree"] * own["pipeline_parallel_degree"] == 64
    assert own["pipeline_parallel_schedule"] == "ZBVZeroBubble" and own["fsdp_reshard_after_forward"] == "never"
    # A pipeline takes its 16 micro-batches of 2 from one local batch.
    assert read["training"]["local_batch_size"] == 512 // 16 and own["pipeline_parallel_microbatch_size"] == 2
    alone = tomllib.loads(
        trainer_flags(workload("torchtitan"), Layout(dp=64, zero_stage=3, recompute="every-k", precision="bf16"))
    )
    assert alone["training"]["local_batch_size"] == 1 and alone["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert alone["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}


def test_nanotron_and_llm_foundry_get_yaml() -> None:
    layout = Layout(dp=8, tp=8, zero_stage=1, micro_batch_size=2, precision="bf16")
    read = yaml.safe_load(trainer_flags(workload("nanotron"), layout))
    assert read["parallelism"] | {"dp": 8, "tp": 8, "pp": 1, "tp_mode": "REDUCE_SCATTER"} == read["parallelism"]
    assert read["tokens"]["batch_accumulation_per_replica"] * 2 * 8 == 512 and read["optimizer"]["zero_stage"] == 1
    hybrid = Layout(dp=64, dp_shard=8, zero_stage=3, micro_batch_size=4, precision="bf16", recompute="full")
    foundry = yaml.safe_load(trainer_flags(workload("llm-foundry"), hybrid))
    with_it = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 8, "activation_checkpointing": True}
    assert foundry["fsdp_config"] | with_it == foundry["fsdp_config"]
    assert (foundry["device_train_microbatch_size"], foundry["global_train_batch_size"]) == (4, 512)


def test_deepspeed_gets_json_and_megatron_words() -> None:
    plain = json.loads(trainer_flags(workload("deepspeed"), Layout(dp=64, zero_stage=3, micro_batch_size=2, precision="bf16")))
    assert plain["train_batch_size"] == 64 * 2 * plain["gradient_accumulation_steps"] == 512
    assert plain["zero_optimization"]["stage"] == 3 and plain["bf16"] == {"enabled": True}
    piped = trainer_flags(workload("deepspeed"), Layout(dp=8, tp=2, pp=4, zero_stage=1, precision="bf16"))
    assert piped.splitlines()[-1] == "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"


def test_our_own_plan_is_read_back_as_the_same_layout(tmp_path) -> None:
    layout = Layout(dp=64, zero_stage=2, dp_shard=32, micro_batch_size=2, recompute="selective", precision="bf16")
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "llama-3-8b"\n' + trainer_flags(workload("ultrascale"), layout))
    run = resolve(file).run
    assert run.layout == layout and (run.batch.sequences_per_batch, run.batch.sequence_length) == (512, 8192)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_all_that_a_search_for_a_trainer_finds_can_be_written_for_it(stack: str, model: str) -> None:
    own = workload(stack, model)
    table = legal_layouts(own).table
    readers: dict[str, Callable] = {"torchtitan": tomllib.loads, "nanotron": yaml.safe_load, "llm-foundry": yaml.safe_load}
    for row in range(0, len(table), max(1, len(table) // 40)):
        layout = table.layout(row)
        assert not cannot_express(own, layout)
        if stack_file(stack).writes:
            assert readers.get(stack_file(stack).writes, str)(trainer_flags(own, layout))


NAMES = tomllib.loads((Path(__file__).parent / "release_names.toml").read_text())
"""What releases have: fields of their configurations."""


def unknown(values: dict, names: dict[str, list[str]], at: str = "") -> list[str]:
    """Keys of nested settings that a release does not have. `names`: by the dotted place, where they are known."""
    found = [f"{at}.{key}" for key in values if at in names and key not in names[at]]
    for key, value in values.items():
        below = f"{at}.{key}".strip(".")
        for item in value if isinstance(value, list) else [value]:
            found += unknown(item, names, below) if isinstance(item, dict) else []
    return found


def drawn(stack: str) -> list[tuple[Workload, Layout]]:
    """Some 30 layouts that a search for a stack looks at, of a dense model and of experts, and in fp8 where it has that."""
    found = []
    for model in ("llama-3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
        own = workload(stack, model)
        table = legal_layouts(own).table
        rows = range(0, len(table), max(1, len(table) // 8))
        found += [(own, table.layout(row)) for row in rows]
    fp8 = [(own, replace(layout, precision="fp8")) for own, layout in found[:4]]
    return found + [(own, layout) for own, layout in fp8 if not cannot_express(own, layout) + not_searched(own.stack, layout)]


def test_every_key_for_torchtitan_is_one_of_its_release() -> None:
    names = NAMES["torchtitan 0.2.2"]
    for own, layout in drawn("torchtitan"):
        text = trainer_flags(own, layout)
        assert "torchtitan 0.2.2" in text.splitlines()[0] and unknown(tomllib.loads(text), names) == []
    assert unknown({"training": {"learning_rate": 1}}, names) == ["training.learning_rate"]  # the check can fail


def test_torchtitan_of_2026_gets_a_function_whose_calls_are_of_its_release() -> None:
    names, checked = NAMES["torchtitan 0.3.0"], set()
    for own, layout in drawn("torchtitan-2026"):
        for call in [node for node in ast.walk(ast.parse(trainer_flags(own, layout))) if isinstance(node, ast.Call)]:
            called = ast.unparse(call.func)
            checked.add(called)
            assert {keyword.arg for keyword in call.keywords} <= set(names[called]), called
    assert {"Trainer.Config", "ParallelismConfig", "TrainingConfig", "Float8LinearConverter.Config"} <= checked


def test_torchtitan_of_2026_is_not_offered_what_is_gone_there() -> None:
    gone = [Layout(dp=32, cp=2, cp_method="ring", zero_stage=3), Layout(dp=64, zero_stage=3, recompute="every-k")]
    for layout in gone:
        assert not cannot_express(workload("torchtitan"), layout) and cannot_express(workload("torchtitan-2026"), layout)


def test_a_model_that_torchtitan_has_no_size_of_is_told() -> None:
    own = replace(workload("torchtitan"), model=replace(preset("llama-3-8b"), num_hidden_layers=31))
    text = trainer_flags(own, Layout(dp=64, zero_stage=3, precision="bf16"))
    assert tomllib.loads(text)["model"]["flavor"] == "SIZE_TO_REGISTER" and "31 layers: register one" in text
    read = tomllib.loads(trainer_flags(workload("torchtitan", "deepseek-v3"), Layout(dp=64, zero_stage=3, precision="bf16")))
    assert (read["model"]["name"], read["model"]["flavor"]) == ("deepseek_v3", "671B")


def test_every_key_for_nanotron_and_llm_foundry_is_one_of_theirs() -> None:
    foundry = NAMES["llm-foundry 0.22.0"]
    places = {"": foundry["TrainConfig"], "model": [*foundry["MPTConfig"], "name"]}
    for own, layout in drawn("nanotron"):
        assert unknown(yaml.safe_load(trainer_flags(own, layout)), NAMES["nanotron 2025"]) == []
    for own, layout in drawn("llm-foundry"):
        assert unknown(yaml.safe_load(trainer_flags(own, layout)), places) == []


def test_every_argument_for_megatron_is_one_of_its_release() -> None:
    release = NAMES["megatron core_r0.16.0"]
    for own, layout in drawn("megatron")[::4]:
        words = megatron_words(trainer_flags(own, layout))
        assert set(words) <= set(release[""])
        for name in ("cp-comm-type", "recompute-modules", "moe-flex-dispatcher-backend"):
            assert set(words.get(name, "").split()) <= set(release[name])


ALONE = Layout(dp=64, zero_stage=1, precision="bf16")
GATES = {"swiglu": "silu", "quick-geglu": "swigluoai"}
BALANCE = {"seq_aux_loss": "sequence", "aux_loss": "micro-batch", "global_aux_loss": "global"}


def megatron_model(words: dict[str, str]) -> dict[str, object]:
    """Fields of the model that Megatron-LM builds from its arguments, by its own defaults. Fields that are left out have no
    argument; layers' windows and positions are lists over the layers."""
    layers, heads, latent = int(words["num-layers"]), words["num-attention-heads"], "multi-latent-attention" in words
    biases, gates = "disable-bias-linear" not in words, [act for flag, act in GATES.items() if flag in words]
    activation = "relu2" if "squared-relu" in words else "gelu_pytorch_tanh" if biases else "exact gelu"
    skips, steps = words.get("window-attn-skip-freq"), words.get("no-rope-freq")
    window = int(words["window-size"].split(",")[0]) + 1 if "window-size" in words else None
    windowed = [window is not None] * layers if skips is None else every(skips, layers, last=False)
    rotary = words["position-embedding-type"] == "rope"
    nope = [not rotary] * layers if steps is None else every(steps, layers, last=True)
    read: dict[str, object] = {
        "hidden_size": int(words["hidden-size"]), "intermediate_size": int(words["ffn-hidden-size"]),
        "num_hidden_layers": layers, "num_attention_heads": int(heads),
        "num_key_value_heads": int(words["num-query-groups"] if "group-query-attention" in words else heads),
        "head_dim": int(words["kv-channels"]), "max_position_embeddings": int(words["max-position-embeddings"]),
        "norm": words["normalization"].lower(), "zero_centered_norm": "apply-layernorm-1p" in words,
        "norm_eps": float(words["norm-epsilon"]), "gated_mlp": bool(gates), "hidden_act": gates[0] if gates else activation,
        "position_embedding": "rotary" if rotary else "learned", "rope_theta": float(words.get("rotary-base", 1e4)),
        "rope_scaling": megatron_scaling(words), "qkv_bias": biases or "add-qkv-bias" in words,
        "attention_output_bias": biases, "mlp_bias": biases, "qk_norm": "qk-layernorm" in words and not latent,
        "attention_sinks": words.get("softmax-type") == "learnable",
        "partial_rotary_factor": float(words.get("rotary-percent", 1)),
        "tie_word_embeddings": "untie-embeddings-and-output-weights" not in words,
        "initializer_range": float(words["init-method-std"]), "dropout": float(words["hidden-dropout"]),
        "num_nextn_predict_layers": int(words.get("mtp-num-layers", 0)),
        "windows": [window if layer else None for layer in windowed], "no positions": nope,
    }  # fmt: skip
    if read["num_nextn_predict_layers"]:
        read["mtp_loss_coef"] = float(words.get("mtp-loss-scaling-factor", 0.1))
    if latent:
        assert "qk-layernorm" in words  # of its narrow projections
        sizes = ("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "kv-lora-rank")
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        read |= {name: int(words[size]) for name, size in zip(names, sizes, strict=True)}
        read["q_lora_rank"] = int(words["q-lora-rank"]) if "q-lora-rank" in words else None
    return read | (megatron_experts(words) if "num-experts" in words else {})


def megatron_experts(words: dict[str, str]) -> dict[str, object]:
    choices, groups = int(words["moe-router-topk"]), int(words.get("moe-router-num-groups", 1))
    score, balance = words.get("moe-router-score-function", "softmax"), words["moe-router-load-balancing-type"]
    biased, chosen = "moe-router-enable-expert-bias" in words, int(words.get("moe-router-group-topk", 1))
    assert not biased or score == "sigmoid"
    method = "noaux_tc" if biased else "greedy"
    if groups > 1:  # a group scores as the sum of its best choices / chosen
        method = {(1, False): "group_limited_greedy", (2, True): "noaux_tc"}.get((choices // chosen, biased), "neither")
    capacity = words.get("moe-expert-capacity-factor")
    return {
        "num_experts": int(words["num-experts"]), "num_experts_per_tok": choices,
        "moe_intermediate_size": int(words["moe-ffn-hidden-size"]),
        "shared_expert_intermediate_size": int(words.get("moe-shared-expert-intermediate-size", 0)),
        "first_k_dense_replace": every(words["moe-layer-freq"], int(words["num-layers"]), last=True).index(True),
        "scoring_func": score, "topk_method": method,
        "norm_topk_prob": choices > 1 and (score == "sigmoid" or "moe-router-pre-softmax" not in words),
        "routed_scaling_factor": float(words.get("moe-router-topk-scaling-factor", 1)), "n_group": groups,
        "topk_group": chosen, "router_aux_loss_coef": float(words.get("moe-aux-loss-coeff", 0)) * (balance != "none"),
        "router_aux_loss_scope": BALANCE.get(balance, "sequence"),
        "router_z_loss_coef": float(words.get("moe-z-loss-coeff", 0)),
        "router_bias_update_rate": float(words.get("moe-router-bias-update-rate", 1e-3)),
        "expert_capacity_factor": float(capacity) if capacity else None,
    }  # fmt: skip


def megatron_scaling(words: dict[str, str]) -> RopeScaling | None:
    """pretrain_gpt.py does not hand --rope-scaling-factor on, so that it is 8."""
    if "multi-latent-attention" not in words:
        return RopeScaling("llama3", 8.0, 8192) if "use-rope-scaling" in words else None
    factor = float(words["rotary-scaling-factor"])
    scale, scale_all = (float(words[key]) if key in words else None for key in ("mscale", "mscale-all-dim"))
    return RopeScaling("yarn", factor, 4096, mscale=scale, mscale_all_dim=scale_all) if factor > 1 else None


def every(frequency: str, layers: int, *, last: bool) -> list[bool]:
    """Megatron-LM's frequency over layers: a list, or an interval whose last layer is `last` and the others not."""
    if "[" in frequency:
        listed = [bool(value) for value in eval(frequency)]
        assert len(listed) == layers
        return listed
    assert not last or layers % int(frequency) == 0
    return [last == ((layer + 1) % int(frequency) == 0) for layer in range(layers)]


def computed(model: Model) -> dict[str, object]:
    """Fields of a model that change what it computes, with lists over layers for windows and positions."""
    values = {field.name: getattr(model, field.name) for field in fields(Model) if field.name not in ("name", "model_type")}
    for part in ("sliding_window", "max_window_layers", "sliding_window_interval", "full_attention_interval"):
        del values[part]
    del values["no_rope_layer_interval"]
    layers = range(model.num_hidden_layers)
    values |= {"hidden_act": model.activation, "windows": [model.window(layer) for layer in layers]}
    values |= {"no positions": [not model.uses_rotary(layer) for layer in layers]}
    values |= {"router_aux_loss_coef": model.balance_loss_coef}
    if not model.balance_loss_coef:
        values["router_aux_loss_scope"] = "sequence"
    return values


def named_parts(text: str) -> set[str]:
    """Fields that the header of a file names as not in it."""
    named = [line for line in text.splitlines() if line.startswith("# Not said below")]
    return {name for line in named for name in re.findall(r"(\w+) = ", line)}


LLAMA, MOE = preset("tiny-llama"), preset("tiny-qwen3-moe")
CHANGED = [
    replace(LLAMA, dropout=0.1), replace(LLAMA, attention_sinks=True), replace(LLAMA, attention_output_bias=True),
    replace(LLAMA, mlp_bias=True), replace(LLAMA, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    replace(LLAMA, zero_centered_norm=True), replace(LLAMA, norm="layernorm", qk_norm=True),
    replace(LLAMA, rope_theta=10000.5), replace(LLAMA, rope_scaling=RopeScaling("linear", 2.0, 1024)),
    replace(LLAMA, num_hidden_layers=7, no_rope_layer_interval=3), replace(LLAMA, gated_mlp=False, hidden_act="relu2"),
    replace(LLAMA, num_hidden_layers=7, sliding_window=16, max_window_layers=3, full_attention_interval=5),
    replace(LLAMA, gated_mlp=False, hidden_act="relu2", qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    replace(MOE, router_z_loss_coef=0.01, expert_capacity_factor=1.5), replace(MOE, router_aux_loss_scope="global"),
    replace(MOE, router_aux_loss_scope="micro-batch", routed_scaling_factor=2.0), replace(MOE, num_experts_per_tok=1),
    replace(MOE, num_experts_per_tok=1, norm_topk_prob=False), replace(MOE, norm_topk_prob=False),
    replace(MOE, scoring_func="sigmoid"), replace(MOE, scoring_func="sigmoid", norm_topk_prob=False),
    replace(MOE, topk_method="noaux_tc"), replace(MOE, scoring_func="sigmoid", topk_method="noaux_tc"),
    replace(MOE, topk_method="group_limited_greedy", n_group=4, topk_group=2),
    replace(MOE, topk_method="group_limited_greedy", n_group=4, topk_group=1),
    replace(preset("tiny-deepseek-v3"), mtp_loss_coef=0.1, router_bias_update_rate=0.01, num_experts_per_tok=4),
]  # fmt: skip


def test_every_part_of_a_model_is_an_argument_for_megatron_or_named_in_the_header() -> None:
    release, defaults = NAMES["megatron core_r0.16.0"], computed(replace(LLAMA, tie_word_embeddings=False))
    for model in [*PRESETS.values(), *CHANGED]:
        assert not model.problems()
        text = trainer_flags(replace(workload("megatron"), model=model), ALONE)
        words, named = megatron_words(text), named_parts(text)
        read = {"vocab_size": int(text.split("vocab_size = ")[1].split()[0])} | megatron_model(words)
        apart = {key for key, value in computed(model).items() if value != read.get(key, defaults[key])}
        assert apart <= named, (model.name, apart - named)
        assert set(words) <= set(release[""]), model.name
        for name in ("softmax-type", "moe-router-score-function", "moe-router-load-balancing-type", "rope-type"):
            assert set(words.get(name, "").split()) <= set(release[name])


def llama_of_nanotron(settings: dict) -> dict[str, object]:
    """Fields of the model that nanotron builds: a Llama without biases, heads as wide as the model allows."""
    model = settings["model"]["model_config"]
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "hidden_act", "rope_theta", "tie_word_embeddings",
    )  # fmt: skip
    width = model["hidden_size"] // model["num_attention_heads"]
    own = {"head_dim": width, "norm_eps": model["rms_norm_eps"], "initializer_range": settings["model"]["init_method"]["std"]}
    return {key: model[key] for key in same} | own


def mpt_of_llm_foundry(settings: dict) -> dict[str, object]:
    """Fields of the model that llm-foundry builds, by the defaults of its MPTConfig."""
    model = settings["model"]
    attention, feed_forward, biases = model["attn_config"], model["ffn_config"], not model["no_bias"]
    act = feed_forward.get("ffn_act_fn", {"name": "gelu", "approximate": "none"})
    assert model["init_config"]["name"] == "baseline_" and model["resid_pdrop"] == model["emb_pdrop"]
    return {
        "vocab_size": model["vocab_size"], "hidden_size": model["d_model"], "num_hidden_layers": model["n_layers"],
        "intermediate_size": feed_forward["ffn_hidden_size"], "num_attention_heads": model["n_heads"],
        "num_key_value_heads": attention.get("kv_n_heads", model["n_heads"]), "head_dim": model["head_dim"],
        "max_position_embeddings": model["max_seq_len"], "norm": model["norm_type"].removeprefix("low_precision_"),
        "norm_eps": model["norm_eps"], "gated_mlp": feed_forward["ffn_type"] == "mptglu",
        "hidden_act": "gelu_pytorch_tanh" if act == {"name": "gelu", "approximate": "tanh"} else act["name"],
        "position_embedding": "learned" if model["learned_pos_emb"] else "rotary",
        "rope_theta": float(attention.get("rope_theta", 10000)), "qkv_bias": biases, "attention_output_bias": biases,
        "mlp_bias": biases, "tie_word_embeddings": model["tie_word_embeddings"],
        "initializer_range": model["init_config"]["init_std"], "dropout": model["resid_pdrop"],
        "no positions": [model["learned_pos_emb"]] * model["n_layers"],
    }  # fmt: skip


@pytest.mark.parametrize(("stack", "reader"), [("nanotron", llama_of_nanotron), ("llm-foundry", mpt_of_llm_foundry)])
def test_every_part_of_a_model_is_a_key_of_yaml_or_named_in_the_header(stack: str, reader: Callable) -> None:
    layout = replace(ALONE, zero_stage=1 if stack == "nanotron" else 3)
    usual = computed(replace(LLAMA, tie_word_embeddings=False))
    for model in [*PRESETS.values(), *CHANGED]:
        text = trainer_flags(replace(workload(stack), model=model), layout)
        layers = {"windows": [None] * model.num_hidden_layers, "no positions": [False] * model.num_hidden_layers}
        read, named = usual | layers | reader(yaml.safe_load(text)), named_parts(text)
        if model.position_embedding == "rotary" and stack == "llm-foundry":  # whose sequence length takes its place
            read["max_position_embeddings"] = model.max_position_embeddings
        apart = {key for key, value in computed(model).items() if value != read[key]}
        lists = {"windows": "sliding_window", "no positions": "position_embedding"}
        if model.no_rope_layer_interval is not None:
            lists["no positions"] = "no_rope_layer_interval"
        assert {lists.get(key, key) for key in apart} <= named, (model.name, apart - named)


def test_torchtitan_gets_a_registered_size_for_the_same_weights_only() -> None:
    def written(model: Model, stack: str = "torchtitan") -> tuple[str, set[str]]:
        text = trainer_flags(replace(workload(stack), model=model), replace(ALONE, zero_stage=3))
        return text, named_parts(text)

    for name in (
        "opt-6.7b",
        "llama-2-7b",
        "mistral-7b-v0.1",
        "mixtral-8x7b",
        "llama-3.2-1b",
    ):  # the first four: 32 layers of 4096
        model, (text, named) = preset(name), written(preset(name))
        usual = {field.name: field.default for field in fields(Model)} | {"name": name, "model_type": model.model_type}
        apart = {key for key, value in usual.items() if getattr(model, key) != value} - {"max_position_embeddings"}
        assert tomllib.loads(text)["model"]["flavor"] == "SIZE_TO_REGISTER" and apart <= named, name
    assert '"1B"' in written(preset("llama-3.2-1b"), "torchtitan-2026")[0]
    assert written(preset("llama-3.1-8b"))[1] == set() and written(preset("llama-3-8b"))[1] == {"rope_scaling"}
    assert {"num_nextn_predict_layers", "router_aux_loss_coef"} <= written(preset("deepseek-v3"))[1]
    assert written(replace(preset("qwen3-8b"), dropout=0.1, norm_eps=1e-5))[1] == {"dropout", "norm_eps"}


def test_megatron_gets_the_routers_and_activations_of_published_models() -> None:
    def words(model: str) -> dict[str, str]:
        return megatron_words(trainer_flags(workload("megatron", model), ALONE))

    latent = words("deepseek-v3")
    router = {"score-function": "sigmoid", "topk-scaling-factor": "2.5", "num-groups": "8", "group-topk": "4"}
    router |= {"enable-expert-bias": "", "load-balancing-type": "seq_aux_loss"}
    assert {name: latent[f"moe-router-{name}"] for name in router} == router
    assert latent["moe-aux-loss-coeff"] == "0.001" and latent["mtp-loss-scaling-factor"] == "0.3" and "qk-layernorm" in latent
    nemotron, clamped = words("nemotron-4-340b"), words("gpt-oss-20b")
    assert "squared-relu" in nemotron and "swiglu" not in nemotron and nemotron["rotary-percent"] == "0.5"
    assert words("smollm3-3b")["no-rope-freq"] == "4" and words("glm-4.5-air")["moe-router-score-function"] == "sigmoid"
    sinks = {"softmax-type": "learnable", "window-size": "127,0", "activation-func-clamp-value": "7.0"}
    assert {name: clamped[name] for name in sinks} == sinks and "disable-bias-linear" not in clamped


def test_numbers_of_yaml_are_numbers() -> None:
    """YAML 1.1 takes 1e-05 for text."""
    read = yaml.safe_load(trainer_flags(workload("nanotron"), Layout(dp=64, zero_stage=1, precision="bf16")))
    assert read["model"]["model_config"]["rms_norm_eps"] == 1e-5
    assert read["optimizer"]["learning_rate_scheduler"]["min_decay_lr"] == 3e-5


def accelerate_env(text: str, file: Path) -> dict[str, str]:
    """The environment in which accelerate starts the ranks of a printed plan, made by accelerate itself."""
    launch = pytest.importorskip("accelerate.commands.launch")
    file.write_text(text)
    read, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    )
    env = launch.prepare_multi_gpu_env(read)
    assert str(read.num_processes) == str(yaml.safe_load(text)["num_processes"])
    return {name: value for name, value in env.items() if name.startswith(("FSDP", "PARALLELISM", "ACCELERATE"))}


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (Layout(dp=32, tp=2, zero_stage=3, recompute="full", sequence_parallel=False, precision="bf16"), ("1", "32", "2")),
        (Layout(dp=64, dp_shard=8, zero_stage=2, precision="bf16"), ("8", "8", "1")),
        (Layout(dp=64, zero_stage=3, precision="fp16"), None),
        (Layout(dp=64, zero_stage=0, precision="fp32", recompute="full"), None),
    ],
)
def test_accelerate_itself_reads_the_plan_for_transformers(
    tmp_path: Path, layout: Layout, axes: tuple[str, ...] | None
) -> None:
    text = trainer_flags(workload("transformers"), layout)
    env = accelerate_env(text, tmp_path / "plan.yaml")
    assert env["ACCELERATE_MIXED_PRECISION"] == {"fp32": "no"}.get(layout.precision, layout.precision)
    assert f"gradient_accumulation_steps={512 // layout.dp}" in text
    if layout.zero_stage == 0:
        assert "ACCELERATE_USE_FSDP" not in env and "gradient_checkpointing=True" in text
        return
    assert env["FSDP_VERSION"] == "2" and env["FSDP_RESHARD_AFTER_FORWARD"] == str(layout.zero_stage == 3).lower()
    assert env["FSDP_ACTIVATION_CHECKPOINTING"] == str(layout.recompute == "full").lower()
    found = tuple(env.get(f"PARALLELISM_CONFIG_{axis}_SIZE") for axis in ("DP_REPLICATE", "DP_SHARD", "TP"))
    assert found == (axes or (None, None, None))


def test_transformers_cuts_no_sequence_beside_tensor_parallelism() -> None:
    table = legal_layouts(workload("transformers")).table
    assert 2 in set(table.tp) and not any(table.sequence_parallel[table.tp > 1])


def test_every_key_for_deepspeed_is_one_of_its_release() -> None:
    release = NAMES["deepspeed 0.18.2"]
    inner = {
        "zero_optimization": release["zero_optimization"],
        "zero_optimization.offload_optimizer": release["offload_optimizer"],
    }
    for own, layout in drawn("deepspeed"):
        config = json.loads(trainer_flags(own, layout).partition("\n\n")[0])
        assert unknown(config, {"": release["top"], **inner}) == []


@pytest.mark.parametrize(
    ("stack", "layout", "key"),
    [
        ("megatron", Layout(dp=64, zero_stage=3), "layout.zero_stage"),
        ("nanotron", Layout(dp=32, cp=2), "layout.cp_method"),
        ("llm-foundry", Layout(dp=32, tp=2), "layout.tp"),
        ("transformers", Layout(dp=32, tp=2, zero_stage=0, sequence_parallel=False), "layout.zero_stage"),
        ("torchtitan", Layout(dp=16, pp=4, schedule="zb-h1", zero_stage=1), "layout.schedule"),
    ],
)
def test_what_a_trainer_has_no_setting_for_is_refused(stack: str, layout: Layout, key: str) -> None:
    with pytest.raises(SpecError) as error:
        trainer_flags(workload(stack), layout)
    assert error.value.problems[0].key == key and f"--stack {stack}" in error.value.problems[0].remedy


def test_megatron_gets_stages_that_are_not_even_one_by_one() -> None:
    layout = Layout(dp=4, pp=16, ep=4, zero_stage=1, precision="bf16", schedule="1f1b")
    words = megatron_words(trainer_flags(workload("megatron", "deepseek-v3"), layout))
    stages = words["pipeline-model-parallel-layout"].split("|")
    assert len(stages) == 16 and stages[0].startswith("E") and stages[-1].endswith("mL")
    assert sum(stage.count("t") for stage in stages) == 61 and words["mtp-num-layers"] == "1"
    assert "pipeline-model-parallel-layout" not in megatron_words(trainer_flags(workload("megatron"), PIPED))


def test_torchtitan_gets_its_stages_and_its_float8() -> None:
    layout = replace(PIPED, zero_stage=1, precision="fp8")
    settings = tomllib.loads(trainer_flags(workload("torchtitan"), layout))
    parallelism = settings["parallelism"]
    assert parallelism["pipeline_parallel_layers_per_stage"] == 32 // 8
    less = [parallelism[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last")]
    assert less == [0, 0] and settings["model"]["converters"] == ["quantize.linear.float8"]
    assert "recipe_name" not in settings["quantize"]["linear"]["float8"]
    by_row = replace(workload("torchtitan"), stack=changed_stack("torchtitan", {"kernels.fp8_scaling": "row"}))
    assert tomllib.loads(trainer_flags(by_row, layout))["quantize"]["linear"]["float8"] == {"recipe_name": "rowwise"}
    odd = replace(workload("torchtitan"), model=replace(preset("llama-3-8b"), num_hidden_layers=9))
    with pytest.raises(SpecError, match="into 5 stages, the plan wants 8"):
        trainer_flags(odd, layout)
    table = legal_layouts(odd).table
    assert {2, 4} & set(table.pp) and 8 not in set(table.pp * table.virtual_stages)


def test_deepspeed_and_composer_get_the_names_that_they_read() -> None:
    experts = trainer_flags(workload("deepspeed", "mixtral-8x7b"), Layout(dp=64, ep=8, zero_stage=1, precision="bf16"))
    assert "--moe-expert-parallel-size 8" in experts
    hybrid = Layout(dp=64, dp_shard=8, zero_stage=3, precision="bf16")
    for layout, strategy in ((replace(hybrid, zero_stage=2), "_HYBRID_SHARD_ZERO2"), (hybrid, "HYBRID_SHARD")):
        text = trainer_flags(workload("llm-foundry"), layout)
        assert yaml.safe_load(text)["fsdp_config"]["sharding_strategy"] == strategy


@pytest.mark.parametrize(
    ("stack", "change", "said"),
    [
        ("nanotron", {"precision": "fp8"}, "nanotron trains in fp32, fp16, bf16"),
        ("deepspeed", {"precision": "fp8"}, "deepspeed trains in"),
        ("torchtitan", {"precision": "fp16"}, "torchtitan trains in"),
        ("megatron", {"offload_activations": True}, "no offload of activations"),
        ("nanotron", {"offload_optimizer": True}, "no offload of optimizer"),
    ],
)
def test_what_a_trainer_has_no_setting_for_is_refused_before_a_search(stack: str, change: dict, said: str) -> None:
    (problem,) = not_searched(STACKS[stack], replace(Layout(precision="bf16"), **change))
    assert said in problem.rule and not not_searched(STACKS[stack], Layout(precision="bf16"))


def test_an_optimizer_that_a_trainer_lacks_is_refused_and_one_it_has_is_printed() -> None:
    assert not_searched(with_optimizer(STACKS["nanotron"], "muon"), Layout())[0].key == "--optimizer"
    narrow = replace(workload("megatron"), stack=with_optimizer(STACKS["megatron"], "adamw-bf16"))
    words = megatron_words(trainer_flags(narrow, PIPED))
    assert words["exp-avg-dtype"] == "bf16" and "use-precision-aware-optimizer" in words


def test_megatron_offloads_with_the_optimizer_that_its_check_of_arguments_requires() -> None:
    words = megatron_words(trainer_flags(workload("megatron"), replace(PIPED, offload_optimizer=True)))
    assert {"optimizer-cpu-offload", "use-precision-aware-optimizer"} <= set(words) and "exp-avg-dtype" not in words
