"""A plan as torchtitan's settings: TOML up to 0.2.2, a registered Python function from 0.3 on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.flags.written import (
    LEARNING_RATE,
    STEPS,
    TORCH_DTYPE,
    YOURS,
    TrainerPlan,
    Yours,
    plain,
    toml,
    unwritten_fields,
)

RELEASE, PYTHON_RELEASE = "torchtitan 0.2.2", "torchtitan 0.3.0, which has no TOML any more"
TORCHTITAN_CP = {"ring": "alltoall", "all-gather": "allgather"}
FLAVORS = {
    "llama3": {"llama-3.1-8b": "8B", "llama-3.1-70b": "70B", "llama-3.1-405b": "405B"},
    "qwen3": {f"qwen3-{size.lower()}": size for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")},
    "deepseek_v3": {"deepseek-v2-lite": "16B", "deepseek-v2": "236B", "deepseek-v3": "671B"},
    "gpt_oss": {"gpt-oss-20b": "20b", "gpt-oss-120b": "120b"},
}
"""Registered sizes of its models (its models/*/__init__.py), by the preset of the same weights."""
PYTHON_FLAVORS = {"llama-3.2-1b": "1B", "llama-3.2-3b": "3B"}
"""Sizes of llama3 from 0.3 on."""
WRITTEN = frozenset({"max_position_embeddings"})
"""The sequence length takes its place; no registered model learns positions."""
NO_FLAVOR = "SIZE_TO_REGISTER"
NOT_IN_PYTHON = ("context_parallel_rotate_method", "expert_tensor_parallel_degree")
ASSETS = "./assets/hf/TOKENIZER"


def write(plan: TrainerPlan) -> str:
    """TOML, with sections as in its job_config.py of 0.2.2."""
    model = plan.workload.model
    family, flavor, registered = _flavor(model, {})
    start = f"{_torchrun(plan)} --job.config_file THIS.toml"
    unwritten = unwritten_fields(model, WRITTEN, registered=registered)
    head = [*plan.head(RELEASE, start, unwritten), *_unregistered(model, family, flavor)]
    return "\n".join([*head, "", toml(_sections(plan, family, flavor))])


def write_python(plan: TrainerPlan) -> str:
    """A function for torchtitan/models/FAMILY/config_registry.py, by the names of 0.3.0."""
    model = plan.workload.model
    family, flavor, registered = _flavor(model, PYTHON_FLAVORS)
    sections = _sections(plan, family, flavor)
    training = {name: value for name, value in sections["training"].items() if name not in ("dataset",)}
    parallelism = {name: value for name, value in sections["parallelism"].items() if name not in NOT_IN_PYTHON}
    if plan.layout.tp > 1:
        parallelism["enable_sequence_parallel"] = plan.layout.sequence_parallel
    recompute = {"full": "FullAC", "selective": "SelectiveAC"}.get(plan.layout.recompute)
    narrow = {"fp8": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}.get(plan.layout.precision)
    converters = f", converters=[{narrow}.Config(model_compile_enabled=True)]" if narrow else ""
    start = f"{_torchrun(plan)} --module {family} --config planned"
    lines = [
        *plan.head(PYTHON_RELEASE, start, unwritten_fields(model, WRITTEN, registered=registered)),
        f"# Append it to torchtitan/models/{family}/config_registry.py.",
        *_unregistered(model, family, flavor),
        "from torchtitan.components.checkpoint import CheckpointManager",
        "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss",
        "from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer",
        *([f"from torchtitan.components.quantization import {narrow}"] if narrow else []),
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {recompute}"] if recompute else []),
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{family} import model_registry",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def planned() -> Trainer.Config:",
        f'    model_spec = model_registry("{flavor}"{converters})',
        "    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))",
        "    return Trainer.Config(",
        "        model_spec=model_spec,",
        "        loss=ChunkedLossWrapper.Config(loss_fn=loss),",
        f'        hf_assets_path="{ASSETS}",  # {YOURS}',
        f"        optimizer=default_adamw(lr={LEARNING_RATE}),  # {YOURS}",
        f"        lr_scheduler=LRSchedulersContainer.Config(warmup_steps={STEPS // 10}),  # {YOURS}",
        f'        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),  # {YOURS}',
        f"        checkpoint=CheckpointManager.Config(enable=True, interval=500),  # {YOURS}",
        "        compile=CompileConfig(enable=True, components=" + '["model", "loss"]),',
        *([f"        activation_checkpoint={recompute}.Config(),"] if recompute else ["        activation_checkpoint=None,"]),
        *_call("training", "TrainingConfig", training),
        *_call("parallelism", "ParallelismConfig", parallelism),
        "    )",
    ]
    return "\n".join(lines)


def _torchrun(plan: TrainerPlan) -> str:
    return f"torchrun --nnodes {plan.nodes} --nproc_per_node {plan.ranks_per_node} -m torchtitan.train"


def _call(name: str, kind: str, values: dict[str, Any]) -> list[str]:
    marks = {key: f"  # {YOURS}" if isinstance(value, Yours) else "" for key, value in values.items()}
    arguments = [f"            {key}={plain(value)!r},{marks[key]}" for key, value in values.items()]
    return [f"        {name}={kind}(", *arguments, "        ),"]


def _flavor(model: Model, further: Mapping[str, str]) -> tuple[str, str, Model | None]:
    """torchtitan's names of the family and the size, and the model that it has under them; `further`: more sizes of llama3."""
    if model.latent_attention:
        family = "deepseek_v3"
    elif model.attention_sinks:
        family = "gpt_oss"
    else:
        family = "qwen3" if model.qk_norm else "llama3"
    for name, flavor in (FLAVORS[family] | dict(further if family == "llama3" else {})).items():
        if _shapes(preset(name)) == _shapes(model):
            return family, flavor, _registered(family, flavor, preset(name))
    return family, NO_FLAVOR, None


def _shapes(model: Model) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights without multi-token prediction, which no registered model has."""
    return [(weight.name, weight.shape) for weight in weights(replace(model, num_nextn_predict_layers=0))]


def _registered(family: str, flavor: str, model: Model) -> Model:
    """`model` as torchtitan has it: without multi-token prediction and balance losses; a bias balances the load of the families
    whose optimizer updates it; one scaling of RoPE for all sizes of llama3."""
    model = replace(model, num_nextn_predict_layers=0, router_aux_loss_coef=0.0, router_aux_loss_scope="sequence")
    if family in ("deepseek_v3", "gpt_oss"):
        model = replace(model, topk_method="noaux_tc", norm_eps=1e-5)
    if family == "llama3":
        model = replace(model, rope_scaling=preset("llama-3.1-8b").rope_scaling)
    if family == "deepseek_v3" and model.rope_scaling is not None:
        mscale = 0.7 if flavor == "16B" else 1.0
        model = replace(model, rope_scaling=replace(model.rope_scaling, mscale=mscale, mscale_all_dim=mscale))
    return replace(model, rope_theta=5e6) if flavor == "235B-A22B" else model


def _unregistered(model: Model, family: str, flavor: str) -> list[str]:
    if flavor != NO_FLAVOR:
        return []
    size = f"hidden size {model.hidden_size}, {model.num_hidden_layers} layers"
    return [f"# No model of torchtitan's is registered with {size}: register one in torchtitan/models/{family}/__init__.py."]


def _sections(plan: TrainerPlan, family: str, flavor: str) -> dict[str, dict[str, Any]]:
    layout, piped = plan.layout, plan.layout.pp > 1
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.shard_size,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.expert_tp,
    }
    if layout.cp > 1:
        parallelism["context_parallel_rotate_method"] = TORCHTITAN_CP[layout.cp_method]
    if piped:
        assert SCHEDULES[layout.schedule].torch, f"torchtitan has no {layout.schedule}"
        parallelism["pipeline_parallel_schedule"] = SCHEDULES[layout.schedule].torch
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch_size
        parallelism["pipeline_parallel_layers_per_stage"] = -(-plan.workload.model.num_hidden_layers // layout.num_stages)
        parallelism["pipeline_parallel_first_stage_less_layers"] = 0
        parallelism["pipeline_parallel_last_stage_less_layers"] = 0
    training = {
        # A pipeline splits the local batch into micro-batches; without one the trainer accumulates up to the global batch.
        "steps": Yours(STEPS),
        "max_norm": Yours(1.0),
        "dataset": Yours("c4"),
        "local_batch_size": layout.micro_batch_size * (plan.accumulation if piped else 1),
        "global_batch_size": plan.workload.sequences_per_batch,
        "seq_len": plan.workload.sequence_length,
        "mixed_precision_param": TORCH_DTYPE.get(layout.precision, "bfloat16"),
        "mixed_precision_reduce": TORCH_DTYPE.get(layout.gradient_reduce_dtype, "float32"),
        "enable_cpu_offload": layout.offload_optimizer,
    }
    mode = "selective" if layout.recompute == "every-k" else layout.recompute
    checkpointing: dict[str, Any] = {"mode": mode}
    if mode == "selective":
        checkpointing["selective_ac_option"] = str(layout.recompute_every) if layout.recompute == "every-k" else "op"
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": Yours("./outputs")},
        "model": {"name": family, "flavor": flavor, "hf_assets_path": Yours(ASSETS)},
        "optimizer": {"name": "AdamW", "lr": Yours(LEARNING_RATE)},
        "lr_scheduler": {"warmup_steps": Yours(STEPS // 10)},
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": checkpointing,
        "compile": {"enable": True, "components": ["model", "loss"]},
        "checkpoint": {"enable": Yours(True), "interval": Yours(500)},
    }
    if layout.precision == "fp8":
        sections["model"]["converters"] = ["quantize.linear.float8"]
        narrow, one_scale = layout.fp8_all_gather, layout.fp8_scaling == "tensor"
        by_row = plan.workload.stack.kernels.fp8_scaling == "row"
        sections["quantize.linear.float8"] = {"recipe_name": "rowwise"} if by_row else {
            "enable_fsdp_float8_all_gather": narrow, "precompute_float8_dynamic_scale_for_fsdp": narrow and one_scale,
        }  # fmt: skip
    if layout.precision == "mxfp8":
        sections["model"]["converters"] = ["quantize.linear.mx"]
        sections["quantize.linear.mx"] = {"recipe_name": "mxfp8_cublas"}
    return sections
