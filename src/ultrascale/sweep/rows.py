"""Writes a sweep as a CSV file with the columns of published runs, one row per cell, for `ultrascale validate`."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.description.run import Run
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.sweep.accuracy import MeasuredCell
from ultrascale.sweep.cells import CellPlace, Failure

GIB = 2**30
COLUMNS: tuple[str, ...] = (
    "id", "model", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "gated_mlp", "tied_embeddings",
    "experts", "topk", "expert_ffn", "shared_expert_ffn", "dense_layers", "seq_len", "gpu", "n_gpus", "gpus_per_node", "dp",
    "zero_stage", "tp", "sp", "cp", "pp", "vpp", "pp_schedule", "ep", "etp", "micro_batch", "global_batch", "grad_accum",
    "recompute", "precision", "compile", "framework", "outcome", "step_time_s", "tokens_per_s_per_gpu", "mfu_reported",
    "peak_mem_gib", "mem_kind", "notes",
)  # fmt: skip


def write_rows(path: Path, places: Sequence[CellPlace]) -> None:
    """Write one row for every cell that was measured or failed; unknown values are blank."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for place in places:
            measured, failure = MeasuredCell.of(place), place.failure
            if measured is not None:
                writer.writerow(_run_columns(place.run, place.path.name) | _result_columns(measured))
            elif failure is not None:
                writer.writerow(_run_columns(place.run, place.path.name) | _failed(failure))


def _run_columns(run: Run, identity: str) -> dict[str, Any]:
    model, layout, batch = run.model, run.layout, run.batch
    cluster = None if run.cluster == "auto" else parse_cluster(run.cluster)
    row = {
        "id": identity, "model": model.name, "layers": model.num_hidden_layers, "hidden": model.hidden_size,
        "heads": model.num_attention_heads, "kv_heads": model.num_key_value_heads, "head_dim": model.head_dim,
        "ffn_hidden": model.intermediate_size, "vocab": model.vocab_size, "gated_mlp": int(model.gated_mlp),
        "tied_embeddings": int(model.tie_word_embeddings), "seq_len": batch.sequence_length, "n_gpus": layout.world_size,
        "dp": layout.dp, "zero_stage": layout.zero_stage, "tp": layout.tp,
        "sp": int(layout.sequence_parallel and layout.tp > 1), "cp": layout.cp, "pp": layout.pp,
        "vpp": layout.virtual_stages, "pp_schedule": layout.schedule if layout.pp > 1 else "", "ep": layout.ep,
        "etp": layout.expert_tp, "micro_batch": layout.micro_batch_size, "global_batch": batch.sequences_per_batch,
        "grad_accum": num_micro_batches(layout, batch.sequences_per_batch), "recompute": layout.recompute,
        "precision": layout.precision, "compile": int(run.compile), "framework": "ultrascale",
    }  # fmt: skip
    if cluster is not None:
        row |= {"gpu": cluster.accelerator.name, "gpus_per_node": cluster.node.num_accelerators}
    if model.num_experts:
        row |= {
            "experts": model.num_experts, "topk": model.num_experts_per_tok, "expert_ffn": model.moe_intermediate_size,
            "shared_expert_ffn": model.shared_expert_intermediate_size, "dense_layers": model.first_k_dense_replace,
        }  # fmt: skip
    return row


def _result_columns(run: MeasuredCell) -> dict[str, Any]:
    peak = run.measured_peak_bytes
    row = {
        "outcome": "ok", "step_time_s": f"{run.step_seconds:.6g}", "mfu_reported": f"{run.mfu:.4g}" if run.mfu <= 1 else "",
        "tokens_per_s_per_gpu": f"{run.tokens_per_second_per_rank:.6g}",
    }  # fmt: skip
    if run.place.run.cluster == "auto":
        row["gpu"] = run.result["device"]
    return row | ({} if peak is None else {"peak_mem_gib": f"{peak / GIB:.6g}", "mem_kind": "max_allocated"})


def _failed(failure: Failure) -> dict[str, Any]:
    return {"outcome": "oom" if failure.outcome == "out of memory" else "crash", "notes": failure.text}
