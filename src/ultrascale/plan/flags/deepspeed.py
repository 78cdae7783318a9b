"""A plan as DeepSpeed's JSON, followed by Megatron-DeepSpeed's arguments for axes that are Megatron's."""

from __future__ import annotations

import json
from typing import Any

from ultrascale.plan.flags.written import TrainerPlan


def write(plan: TrainerPlan) -> str:
    """A ds_config.json for DeepSpeed 0.18.2; JSON has no comments, so that clipping, the user's choice, is not marked."""
    layout = plan.layout
    zero: dict[str, Any] = {"stage": layout.zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if 1 < layout.shard_size < layout.dp:
        zero["mics_shard_size"] = layout.shard_size
    if layout.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": plan.workload.sequences_per_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
    }
    if layout.precision in ("bf16", "fp16"):
        config[layout.precision] = {"enabled": True}
    words = {
        "tensor-model-parallel-size": layout.tp, "pipeline-model-parallel-size": layout.pp,
        "ds-sequence-parallel-size": layout.cp, "moe-expert-parallel-size": layout.ep,
    }  # fmt: skip
    arguments = [f"--{name} {value}" for name, value in words.items() if value > 1]
    arguments += ["--checkpoint-activations --deepspeed-activation-checkpointing"] if layout.recompute == "full" else []
    return "\n".join([json.dumps(config, indent=2), *(["", " ".join(arguments)] if arguments else [])])
