"""Options of a run beside how it is cut, drawn for a layout that is drawn already (`agree.test_trace_agrees`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from ultrascale.config.rules.run_rules import run_problems
from ultrascale.config.rules.trainable import untrainable_layout
from ultrascale.description.recomputed import modules_name
from ultrascale.description.run import Optimizer, Run
from ultrascale.work.recompute import available_modules

MODES = ("none", "full", "selective", "selective+mlp", "selective+qkv+attention", "selective+attention+output+mlp+down")
OPTIMIZERS = (Optimizer(name="muon"), Optimizer(name="adamw-bf16"), Optimizer(name="adamw-8bit"))
DROPOUT = 0.1
MOST = 3
"""Options of a run."""


@st.composite
def with_options(draw: st.DrawFn, run: Run) -> Run:
    """`run` with some options, each left out where the trainer refuses it."""
    for name in draw(st.lists(st.sampled_from(OPTIONS), max_size=MOST, unique=True)):
        changed = draw(with_option(name, run))
        layout = changed.layout
        if not layout.problems() and not run_problems(changed) and not untrainable_layout(layout):
            run = changed
    return run


def with_option(name: str, run: Run) -> st.SearchStrategy[Run]:
    """`run` with a value of one of `OPTIONS`."""
    if name == "dropout":
        return st.just(replace(run, model=replace(run.model, dropout=DROPOUT)))
    if name == "optimizer":
        return st.sampled_from(OPTIMIZERS).map(lambda one: replace(run, optimizer=one))
    values = _values(run)[name]
    return st.fixed_dictionaries(values).map(lambda some: replace(run, layout=replace(run.layout, **some)))


def _values(run: Run) -> dict[str, dict[str, st.SearchStrategy[Any]]]:
    """Fields of the layout for each of the other options."""
    blocks = run.model.num_hidden_layers + run.model.num_nextn_predict_layers
    scaling, kept = st.sampled_from(["row", "tensor", "delayed"]), st.sampled_from([0, 0, 1])
    return {
        "fp8": {"precision": st.just("fp8"), "fp8_scaling": scaling, "fp8_keep_blocks": kept, "fp8_all_gather": st.booleans()},
        "offload_activations": {"offload_activations": st.just(True)},
        "offload_optimizer": {"offload_optimizer": st.just(True)},
        "partition_checkpoints": {"partition_checkpoints": st.just(True), "recompute": st.just("full")},
        "mlp_chunks": {"mlp_chunks": st.sampled_from([2, 4])},
        "recompute_blocks": {
            "recompute": st.just("blocks"),
            "recompute_blocks": st.lists(_modes(run), min_size=blocks, max_size=blocks).map(tuple),
        },
        "recompute_every": {"recompute": st.just("every-k"), "recompute_every": st.sampled_from([1, 3])},
        "reduce_dtype": {"reduce_dtype": st.just("bf16")},
        "cp_heads": {"cp_method": st.just("ring+all-to-all"), "cp_heads": st.just(2)},
        "attention": {"attention": st.sampled_from(["sdpa", "varlen"])},
        "layers_per_stage": {"layers_per_stage": _cuts(run.model.num_hidden_layers, run.layout.num_stages)},
    }  # fmt: skip


def _modes(run: Run) -> st.SearchStrategy[str]:
    """Of `MODES`, or some modules of the model."""
    modules = st.sets(st.sampled_from(available_modules(run.model)), min_size=1).map(modules_name)
    return st.one_of(st.sampled_from(MODES), modules)


def _cuts(layers: int, stages: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Layers of each stage, of so many in all."""
    inner = st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1).map(sorted)
    return inner.map(lambda ends: tuple(end - start for start, end in pairwise([0, *ends, layers])))


OPTIONS = (
    "fp8", "dropout", "optimizer", "offload_activations", "offload_optimizer", "partition_checkpoints", "mlp_chunks",
    "recompute_blocks", "recompute_every", "reduce_dtype", "cp_heads", "attention", "layers_per_stage",
)  # fmt: skip
