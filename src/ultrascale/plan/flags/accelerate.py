"""A plan as a configuration file of accelerate, with what goes into transformers' TrainingArguments (and TRL's, which extend
them) as comments above it."""

from __future__ import annotations

from typing import Any

from ultrascale.plan.flags.written import TORCH_DTYPE, TrainerPlan, Yours, yaml

RELEASE = "transformers 4.57 and accelerate 1.11"
START = "accelerate launch --config_file THIS.yaml YOUR_SCRIPT.py"


def write(plan: TrainerPlan) -> str:
    """YAML for `accelerate launch`."""
    layout = plan.layout
    arguments = {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        **({layout.precision: True} if layout.precision in ("bf16", "fp16") else {}),
        **({"gradient_checkpointing": True} if layout.recompute == "full" and not _is_sharded(plan) else {}),
    }
    lines = [
        *plan.head(RELEASE, START, ()),
        f"# TrainingArguments: {', '.join(f'{name}={value}' for name, value in arguments.items())}",
        f"# Load the model with dtype=torch.{TORCH_DTYPE['fp32']}: the plan has fp32 weights, which are cast in a step.",
    ]
    if layout.tp > 1:
        lines.append('# And with tp_plan="auto", device_mesh=accelerator.torch_device_mesh.')
    return "\n".join([*lines, "", yaml(_config(plan))])


def _is_sharded(plan: TrainerPlan) -> bool:
    """True if FSDP2 runs the plan: it also hosts tensor parallelism."""
    return plan.layout.zero_stage > 0 or plan.layout.tp > 1


def _config(plan: TrainerPlan) -> dict[str, Any]:
    layout = plan.layout
    kind = "FSDP" if _is_sharded(plan) else "MULTI_GPU" if layout.world_size > 1 else '"NO"'
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": layout.precision if layout.precision in ("bf16", "fp16") else '"no"',
        "num_machines": plan.nodes,
        "num_processes": layout.world_size,
        "machine_rank": Yours(0) if plan.nodes > 1 else 0,
    }
    if plan.nodes > 1:
        config |= {"main_process_ip": Yours("HOST"), "main_process_port": Yours(29500)}
    if _is_sharded(plan):
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_state_dict_type": Yours("SHARDED_STATE_DICT"),
        }
    if layout.tp > 1 or (_is_sharded(plan) and layout.dp_replicate > 1):
        sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.shard_size, "tp": layout.tp, "cp": layout.cp}
        config["parallelism_config"] = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    return config
