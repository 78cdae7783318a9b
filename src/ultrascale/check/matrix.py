"""The proven combinations, as tables: every pair of axes, every schedule with every ZeRO stage, every context-parallel method,
recomputation and other ways to save memory, model families, experts, and layouts of five axes.

A cell is proven, refused (with the program's own reason, a matter of principle), or untried: it needs more processes than were
allowed. Cells are the smallest of their kind: two ranks per axis, one sequence per micro-batch, odd sizes wherever nothing must
divide, two optimizer steps with gradients that are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.check.compare import Verdict
from ultrascale.check.prove import Case, prove_all
from ultrascale.check.small import provable, shrink_model
from ultrascale.config.rules.run_rules import parallelism_problems
from ultrascale.config.rules.trainable import untrainable
from ultrascale.description.architecture.families import TRAINED
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.recomputed import KINDS, mode_name
from ultrascale.description.run import Data, Optimizer, Run
from ultrascale.description.schedules import SCHEDULES
from ultrascale.parallel.pipeline.pipeline_parallel import build_orders

LENGTH = 23
"""Tokens of a sequence: not divisible by any number of ranks."""
STEPS = 2
DENSE, SPARSE = "tiny-llama", "tiny-mixtral"
NAMED = (
    ("norms, activation functions", "norm+mlp_act", "norm+mlp_act+moe_act"),
    ("attention, gate and up", "core_attn+mlp", "core_attn+mla_up_proj+shared_experts"),
)
"""Modules recomputed by name: how a cell is called, those of a dense model and of one with experts."""
FAMILIES = tuple(f"tiny-{kind.replace('_', '-')}" for kind in TRAINED)
AXES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2}, "ZeRO 1": {"dp": 2, "zero_stage": 1}, "ZeRO 2": {"dp": 2, "zero_stage": 2},
    "ZeRO 3": {"dp": 2, "zero_stage": 3}, "tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "ring": {"cp": 2}, "ring of 3": {"cp": 3}, "all-gather": {"cp": 2, "cp_method": "all-gather"},
    "all-to-all": {"cp": 2, "cp_method": "all-to-all"},
    "ring+all-to-all": {"cp": 4, "cp_method": "ring+all-to-all", "cp_heads": 2},
}  # fmt: skip
CONTEXT_COLUMNS = {
    "documents": DENSE, "one stream": DENSE, "window": "tiny-mistral", "sinks": "tiny-gpt-oss",
    "local RoPE": "tiny-gemma3-text", "latent attention": "tiny-deepseek-v3",
}  # fmt: skip
"""Preset of each column of the table of context parallelism."""
DEEPEST: dict[str, dict[str, Any]] = {
    "tp cp pp ep": {"tp": 2, "cp": 2, "pp": 2, "ep": 2},
    "dp cp pp ep expert_tp": {"dp": 2, "cp": 2, "pp": 2, "ep": 2, "expert_tp": 2, "zero_stage": 1},
    "dp tp pp ep": {"dp": 2, "tp": 2, "pp": 2, "ep": 4, "zero_stage": 2},
    "dp tp cp ep": {"dp": 2, "tp": 2, "cp": 2, "ep": 2, "zero_stage": 3},
    "dp tp pp zb-v": {"dp": 2, "tp": 2, "pp": 2, "schedule": "zb-v", "virtual_stages": 2, "zero_stage": 1},
    "dp cp pp dualpipe-v": {"dp": 2, "cp": 2, "pp": 2, "schedule": "dualpipe-v", "virtual_stages": 2, "zero_stage": 2},
    "dp tp pp dualpipe": {"dp": 2, "tp": 2, "pp": 2, "schedule": "dualpipe", "zero_stage": 1},
    "dp pp dualpipe ep": {"dp": 2, "pp": 4, "ep": 2, "schedule": "dualpipe", "zero_stage": 2},
    "tp cp pp interleaved": {"tp": 2, "cp": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "dp tp cp": {"dp": 2, "tp": 2, "cp": 2, "zero_stage": 3, "recompute": "selective"},
    "hybrid dp 4 pp": {"dp": 4, "dp_shard": 2, "pp": 2, "zero_stage": 2},
    "cp 4 of two kinds, tp": {"cp": 4, "cp_method": "ring+all-to-all", "cp_heads": 2, "tp": 2},
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One combination, with its position in a table."""

    table: str
    row: str
    column: str
    run: Run
    refused: str = ""
    """Reason for refusal, if it is refused."""

    @property
    def name(self) -> str:
        return f"{self.table}: {self.row}, {self.column}"


@dataclass(frozen=True)
class CellOutcome:
    """Result of one cell of the matrix: its verdict, or none if it was refused or not tried."""

    cell: Cell
    verdict: Verdict | None

    @property
    def state(self) -> str:
        """`proven`, `refused`, `untried` or `DIFFERS`."""
        if self.cell.refused:
            return "refused"
        if self.verdict is None:
            return "untried"
        return "proven" if self.verdict.holds else "DIFFERS"


def cells() -> list[Cell]:
    """Every combination, table by table."""
    return [
        *_pairs(), *_schedules(), *_context(), *_recomputation(), *_memory(), *_ties(), *_families(), *_experts(), *_unusual(),
        *_deepest(),
    ]  # fmt: skip


def prove_cells(
    todo: list[Cell],
    *,
    processes: int,
    steps: int = STEPS,
    on_verdict: Callable[[Verdict], None] | None = None,
) -> list[CellOutcome]:
    """Prove the cells that need at most `processes` processes and are not refused; a failure does not stop the others."""
    tried = [cell for cell in todo if not cell.refused and cell.run.layout.world_size <= processes]
    # Cells of one model are adjacent, so that its reference is computed once.
    tried.sort(key=lambda cell: repr(cell.run.model))
    cases = [Case(cell.name, cell.run) for cell in tried]
    verdicts = dict(zip(map(id, tried), prove_all(cases, steps=steps, go_on=True, on_verdict=on_verdict), strict=True))
    return [CellOutcome(cell, verdicts.get(id(cell))) for cell in todo]


def _pairs() -> Iterator[Cell]:
    axes = {**AXES, "ep": {"ep": 2}, "expert_tp": {"expert_tp": 2}}
    for number, (row, first) in enumerate(axes.items()):
        for column, second in list(axes.items())[: number + 1]:
            if row == column or not ({"dp"} <= first.keys() and {"dp"} <= second.keys()):  # one ZeRO stage at a time
                yield _cell("Axes, two by two", row, column, _with_ranks_for_experts(first | second))


def _with_ranks_for_experts(layout: dict[str, Any]) -> dict[str, Any]:
    """Layout with enough ranks for experts, which are cut out of tp x cp x dp: raises dp where there are too few."""
    needed = layout.get("ep", 1) * layout.get("expert_tp", 1)
    plane = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("cp", 1)
    return layout if plane >= needed else layout | {"dp": needed // plane * layout.get("dp", 1)}


def _schedules() -> Iterator[Cell]:
    beside = {f"ZeRO {stage}": {"dp": 2, "zero_stage": stage} for stage in range(4)}
    beside |= {"tp": {"tp": 2}, "cp": {"cp": 2}, "ep": {"dp": 2, "ep": 2}, "recompute": {"recompute": "full"}}
    for schedule, known in SCHEDULES.items():
        pipeline = {"pp": 2, "schedule": schedule, "virtual_stages": known.virtual_stages or 2}
        for column, other in beside.items():
            yield _cell("Schedules", schedule, column, pipeline | other)
            if column in ("ZeRO 1", "ZeRO 3", "tp", "ep"):
                yield _cell("Schedules by torch's runtime", schedule, column,
                            pipeline | other | {"pipeline_runtime": "torch"})  # fmt: skip
    for schedule in ("1f1b", "zb-h1", "dualpipe"):
        yield _cell("Schedules", f"{schedule}, 4 ranks", "ZeRO 0", {"pp": 4, "schedule": schedule})


def _context() -> Iterator[Cell]:
    for method, layout in METHODS.items():
        for column, preset in CONTEXT_COLUMNS.items():
            yield _cell("Context parallelism", method, column, layout, preset, documents=column != "one stream")
        if Layout(**layout).cp < 3:
            yield _cell("Context parallelism", method, "tp", layout | {"tp": 2})


def _recomputation() -> Iterator[Cell]:
    axes = {key: AXES[key] for key in ("ZeRO 1", "ZeRO 3", "tp", "cp", "pp")} | {"ep": {"dp": 2, "ep": 2}}
    for kind in ("selective", "full", "every-k"):
        for column, layout in axes.items():
            yield _cell("Recomputation", kind, column, layout | {"recompute": kind})
    for column, layout in axes.items():
        options = {"recompute": "blocks", "recompute_blocks": ("full", mode_name(KINDS), "none")}
        yield _cell("Recomputation", "block by block", column, layout | options)
        for kind, dense, experts in NAMED:
            preset, modules = ("tiny-deepseek-v3", experts) if column == "ep" else (DENSE, dense)
            yield _cell("Recomputation", kind, column, layout | {"recompute": modules}, preset)


def _memory() -> Iterator[Cell]:
    """Other ways to save memory. Offloaded activations are absent: at these sizes all are too small to be sent."""
    axes = {key: AXES[key] for key in ("ZeRO 1", "ZeRO 3", "cp", "pp")} | {"ep": {"dp": 2, "ep": 2}}
    tp = {"tp": {"tp": 2}, "dp tp": {"dp": 2, "tp": 2, "zero_stage": 1}, "tp pp": {"tp": 2, "pp": 2}}
    for column, layout in {**axes, **tp}.items():
        yield _cell("Memory", "optimizer on the host", column, layout | {"offload_optimizer": True})
        if "tp" not in layout and column != "ep":
            for kind in ("none", "full"):
                pieces = {"mlp_chunks": 3, "recompute": kind}
                yield _cell("Memory", f"MLP in 3 pieces, recompute {kind}", column, layout | pieces)
        elif "tp" in layout:
            partitioned = {"partition_checkpoints": True, "recompute": "full", "sequence_parallel": False}
            yield _cell("Memory", "checkpoints cut over tp", column, layout | partitioned)


def _ties() -> Iterator[Cell]:
    axes = {key: AXES[key] for key in ("ZeRO 3", "tp", "cp", "pp")} | {"tp pp": {"tp": 2, "pp": 2}}
    axes |= {"pp ZeRO 1": {"pp": 2, "dp": 2, "zero_stage": 1}, "pp cp": {"pp": 2, "cp": 2}}
    axes |= {"zb-v": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2}, "dualpipe": {"pp": 2, "schedule": "dualpipe"}}
    for column, layout in axes.items():
        yield _cell("Embedding and sequence", "tied", column, layout, model={"tie_word_embeddings": True})
        if layout.get("tp"):
            yield _cell("Embedding and sequence", "sequences whole", column, layout | {"sequence_parallel": False})
    for column, layout in {"tp dp": {"tp": 2, "dp": 2}, "tp cp": {"tp": 2, "cp": 2}}.items():
        yield _cell("Embedding and sequence", "sequences whole", column, layout | {"sequence_parallel": False})


def _families() -> Iterator[Cell]:
    axes = {"ZeRO 3 of 3": {"dp": 3, "zero_stage": 3}, "tp": {"tp": 2}, "tp, whole": {"tp": 2, "sequence_parallel": False}}
    axes |= {"cp": {"cp": 2}, "pp": {"pp": 2}, "zb-h1": {"pp": 2, "schedule": "zb-h1"}, "ep": {"dp": 2, "ep": 2}}
    for preset in FAMILIES:
        for column, layout in axes.items():
            if column != "ep" or PRESETS[preset].num_experts:
                yield _cell("Families", PRESETS[preset].model_type, column, layout, preset)


def _experts() -> Iterator[Cell]:
    layouts = {
        "ep 2 in dp": {"dp": 2, "ep": 2}, "ep 2 in tp": {"tp": 2, "ep": 2}, "ep 2 in cp": {"cp": 2, "ep": 2},
        "ep 2 in tp, whole": {"tp": 2, "ep": 2, "sequence_parallel": False},
        "expert_tp 2 in tp": {"tp": 2, "expert_tp": 2}, "ep 2 x expert_tp 2": {"dp": 4, "ep": 2, "expert_tp": 2},
        "ep 4": {"dp": 4, "ep": 4}, "ep 2, ZeRO 3": {"dp": 4, "ep": 2, "zero_stage": 3},
        "ep 2, pp": {"dp": 2, "ep": 2, "pp": 2},
        "ep 2, dp tp": {"dp": 2, "tp": 2, "ep": 2, "zero_stage": 2},
    }  # fmt: skip
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "mixtral": (SPARSE, {}), "deepseek_v3": ("tiny-deepseek-v3", {}), "gpt_oss": ("tiny-gpt-oss", {}),
        "capacity 1": (SPARSE, {"expert_capacity_factor": 1.0}),
        "loss by micro-batch": ("tiny-olmoe", {"router_aux_loss_coef": 0.1, "router_aux_loss_scope": "micro-batch"}),
        "loss over all ranks": ("tiny-olmoe", {"router_aux_loss_coef": 0.1, "router_aux_loss_scope": "global",
                                               "router_z_loss_coef": 0.1}),
    }  # fmt: skip
    for row, layout in layouts.items():
        for column, (preset, model) in kinds.items():
            yield _cell("Experts", row, column, layout, preset, model=model, micro_batch_size=2)


def _unusual() -> Iterator[Cell]:
    odd_models: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "tp 4, two heads of keys": ({"tp": 4}, {"num_attention_heads": 8, "num_key_value_heads": 2}),
        "tp 3": ({"tp": 3}, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 45}),
        "dp 3 in ZeRO 2": ({"dp": 3, "zero_stage": 2}, {}),
        "groups of 2 of 4": ({"dp": 4, "dp_shard": 2, "zero_stage": 3}, {}),
        "two blocks a bucket": ({"dp": 2, "zero_stage": 3, "layers_per_bucket": 2}, {}),
        "embedding and head alone": ({"pp": 3, "layers_per_stage": (0, 3, 0)}, {}),
        "pp 3, uneven": ({"pp": 3, "layers_per_stage": (1, 1, 1)}, {"tie_word_embeddings": True}),
    }
    for row, (layout, model) in odd_models.items():
        yield _cell("Odd numbers", row, "llama", layout, model=model)


def _deepest() -> Iterator[Cell]:
    for row, layout in DEEPEST.items():
        preset = "tiny-deepseek-v3" if "ep" in layout else DENSE
        yield _cell("Three axes and more", row, PRESETS[preset].model_type, layout, preset)
        if "ep" in layout:
            yield _cell("Three axes and more", row, "mixtral", layout)


def _cell(
    table: str, row: str, column: str, layout: dict[str, Any], preset: str = "", *, model: dict[str, Any] | None = None,
    documents: bool = True, micro_batch_size: int = 1,
) -> Cell:  # fmt: skip
    full = Layout(precision="fp64", micro_batch_size=micro_batch_size, **layout)
    preset = preset or (SPARSE if full.ep * full.expert_tp > 1 else DENSE)
    small = replace(shrink_model(PRESETS[preset], full), **(model or {}))
    optimizer = Optimizer(learning_rate=1e-2, clip_grad_norm=0.5, warmup_steps=1)
    run = Run(small, steps=10, layout=full, optimizer=optimizer, data=Data(document_mask=documents))
    run = provable(run, longest=LENGTH)
    sequences = 4 * micro_batch_size if 4 % full.dp == 0 else 2 * full.dp * micro_batch_size
    run = replace(run, batch=replace(run.batch, sequences_per_batch=sequences))
    return Cell(table, row, column, run, _refusal(small, full, sequences // (full.dp * micro_batch_size)))


def _refusal(model: Model, layout: Layout, num_micro_batches: int) -> str:
    """The program's own reason for refusing this combination; empty if it runs."""
    problems = [*model.problems(), *layout.problems(), *untrainable(model, layout)]
    problems += parallelism_problems(model, layout, sequence_length=LENGTH)
    if not problems and layout.pp > 1:
        try:
            build_orders(layout, num_micro_batches)
        except SpecError as error:
            problems += error.problems
    return "; ".join(f"{problem.key} {problem.rule}" for problem in problems)
