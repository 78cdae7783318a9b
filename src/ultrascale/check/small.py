"""A run scaled down to one machine: its own axes over a few processes, a small model of its own kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from math import lcm, prod
from pathlib import Path
from typing import Any

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.recomputed import KINDS, blocks_text, mode_name, modes_of
from ultrascale.description.run import Batch, Log, Run
from ultrascale.schedules.build import is_file
from ultrascale.schedules.executable import shape_of
from ultrascale.schedules.kinds.custom import read_schedule
from ultrascale.work.sharding.places import zero_shape

LARGEST_PARAMETERS = 3_000_000
"""Models with more parameters are shrunk before they are proven."""
MOST_PROCESSES = 8
"""Runs of more processes are proven with fewer, unless the user says how many."""
LONGEST = 61
"""Tokens of a sequence in a proof: odd, and prime, so that no axis divides it."""
HEAD_DIM, DATA_ONLY = 8, 4
"""Head dimension of a small model; and processes of a large run with data parallelism alone: two groups of two."""


def small_layouts(run_layout: Layout, processes: int | None = None) -> list[Layout]:
    """Layouts of few ranks that together have every axis of `run_layout`, each with as many axes as fit.

    One: `run_layout` itself, if a laptop can start it. `processes`: exactly this many ranks; then axes that do not fit are left
    out.
    """
    if processes is None and 1 < run_layout.world_size <= MOST_PROCESSES:
        return [run_layout]
    axes = {axis: _fewest_ranks(run_layout, axis) for axis in ("pp", "cp", "tp", "dp") if getattr(run_layout, axis) > 1}
    if processes is None and set(axes) <= {"dp"}:
        return [_shrink_layout(run_layout, {"dp": DATA_ONLY if axes else 2})]
    most = MOST_PROCESSES if processes is None else processes
    fitting = [dict(subset) for subset in _subsets(axes) if _fits(subset, most, exactly=processes is not None)]
    widest = [subset for subset in fitting if not any(subset.keys() < other.keys() for other in fitting)]
    if processes is None:
        return [_shrink_layout(run_layout, subset) for subset in widest]
    best = max(widest, key=len)
    return [_shrink_layout(run_layout, best | {"dp": best.get("dp", 1) * (processes // prod(best.values()))})]


def provable(run: Run, target: Layout | None = None, *, longest: int = LONGEST) -> Run:
    """`run` in float64 and small enough: the same kind of model, layout and optimizer. Its layout is unchanged.

    `target`: the layout that it represents, if that is another. A sequence has at most `longest` tokens. Windows and learned
    positions are shortened so that they take effect at that length, also for a model that is not shrunk.
    """
    run_layout, whole = run.layout, num_parameters(run.model) <= LARGEST_PARAMETERS
    model = (
        run.model if whole else shrink_model(run.model, run_layout, shards_rows=_shards_rows(run.model, target or run_layout))
    )
    length = min(run.batch.sequence_length, longest, model.max_position_embeddings)
    model = replace(model, **_window_overrides(model, run_layout, length))
    layout = replace(run_layout, precision="fp64", reduce_dtype=None, micro_batch_size=min(2, run_layout.micro_batch_size))
    if run_layout.layers_per_stage is not None and sum(run_layout.layers_per_stage) != model.num_hidden_layers:
        layout = replace(layout, layers_per_stage=None)
    layout = replace(layout, **_recompute_overrides(run_layout, model.num_hidden_layers))
    batch = Batch(sequence_length=length, sequences_per_batch=layout.dp * layout.micro_batch_size)
    return replace(run, model=model, layout=layout, device="cpu", compile=False, log=Log(memory_steps=0), batch=batch)


def _window_overrides(model: Model, layout: Layout, length: int) -> dict[str, Any]:
    """A window shorter than the pieces that context parallelism cuts a document of `length` into, so that it ends within what
    one rank sees of another, at each of their borders; and no learned position that no token has."""
    overrides: dict[str, Any] = {}
    if model.sliding_window is not None:
        overrides["sliding_window"] = min(model.sliding_window, max(2, length // (2 * layout.cp_grid[0]) - 1))
    if model.position_embedding == "learned":
        overrides["max_position_embeddings"] = length
    return overrides


def _recompute_overrides(run_layout: Layout, num_layers: int) -> dict[str, Any]:
    """Ways to recompute for a small model's blocks: those that a run tells, each in its turn, or all that "auto" may choose."""
    if run_layout.recompute not in ("auto", "blocks"):
        return {}
    choices = dict.fromkeys(modes_of(run_layout.recompute_blocks)) or ("full", mode_name(KINDS), "none")
    modes = [mode for _, mode in zip(range(num_layers), cycle(choices), strict=False)]
    return {"recompute": "blocks", "recompute_budget": None, "recompute_blocks": blocks_text(modes)}


def micro_batch_counts(layout: Layout) -> tuple[int, ...]:
    """Numbers of micro-batches per step to prove: one, and several; for a schedule in a file its own number."""
    if layout.pp > 1 and is_file(layout.schedule):
        return (shape_of(read_schedule(Path(layout.schedule)))[1],)
    return (1, 3)


def shrink_model(model: Model, layout: Layout | None = None, *, shards_rows: bool | None = None) -> Model:
    """A small model of the same kind (heads per group, norms, biases, positions, windows, experts, tying), with odd sizes
    except where `layout` must divide them, so that shards are uneven. `shards_rows`: True: ZeRO shards rows of experts; False:
    whole experts; None: either."""
    cut = layout or Layout()
    groups = 2 if model.num_key_value_heads > 1 else 1
    heads = groups * min(3, model.num_attention_heads // model.num_key_value_heads)
    heads = lcm(heads, cut.tp * (cut.cp_grid[1] if cut.cp > 1 else 1))
    window = None if model.sliding_window is None else min(model.sliding_window, 24)
    bare = None if model.no_rope_layer_interval is None else min(model.no_rope_layer_interval, 2)
    full = None if model.full_attention_interval is None else min(model.full_attention_interval, 2)
    small = replace(
        model, vocab_size=211, hidden_size=HEAD_DIM * heads, intermediate_size=11 * lcm(4, cut.tp),
        num_hidden_layers=max(3, cut.num_stages), num_attention_heads=heads, num_key_value_heads=_groups(groups, cut.tp),
        head_dim=HEAD_DIM, sliding_window=window, no_rope_layer_interval=bare, full_attention_interval=full,
        max_window_layers=min(1, model.max_window_layers),
        max_position_embeddings=min(128, model.max_position_embeddings),
        num_nextn_predict_layers=min(1, model.num_nextn_predict_layers),
    )  # fmt: skip
    small = _small_latent(small) if model.latent_attention else small
    return _small_experts(small, cut, shards_rows=shards_rows) if model.num_experts else small


def left_out(run_layout: Layout, layouts: list[Layout]) -> list[str]:
    """Axes of `run_layout` that none of `layouts` has."""
    return [axis for axis in ("tp", "cp", "pp", "dp", "ep", "expert_tp") if getattr(run_layout, axis) > 1
            and all(getattr(layout, axis) == 1 for layout in layouts)]  # fmt: skip


def _groups(groups: int, tp: int) -> int:
    """Key/value heads that tp ranks can shard or replicate."""
    return groups if groups % tp == 0 or tp % groups == 0 else tp


def _small_latent(model: Model) -> Model:
    heads, ranks = model.num_attention_heads, None if model.q_lora_rank is None else 20
    return replace(
        model, q_lora_rank=ranks, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, head_dim=12,
        num_key_value_heads=heads,
    )  # fmt: skip


def _shards_rows(model: Model, layout: Layout) -> bool:
    """True if ZeRO shards rows of experts, since its ranks do not divide the experts of an `ep` rank."""
    shape = (model.num_experts // layout.ep, 1, 1)
    return zero_shape(shape, layout.expert_shard_size) != shape


def _small_experts(model: Model, layout: Layout, *, shards_rows: bool | None) -> Model:
    groups, choices = min(4, model.n_group), min(3, model.num_experts_per_tok)
    chosen = min(model.topk_group, max(1, groups // 2))
    count = lcm(max(2 * groups, 4), layout.ep)
    while chosen * count // groups < choices or count < 2 * choices:
        count += lcm(groups, layout.ep)
    counts = [count + more * lcm(groups, layout.ep) for more in range(layout.expert_shard_size)]
    fitting = [n for n in counts if shards_rows in (None, _shards_rows(replace(model, num_experts=n), layout))]
    count = min(fitting, default=count)
    width = 7 * lcm(2, layout.expert_tp)
    shared = bool(model.shared_expert_intermediate_size) * lcm(2 * width, layout.tp)  # Hugging Face counts it in experts
    return replace(
        model, num_experts=count, num_experts_per_tok=choices, n_group=groups, topk_group=chosen,
        moe_intermediate_size=width, shared_expert_intermediate_size=shared,
        first_k_dense_replace=min(1, model.first_k_dense_replace),
    )  # fmt: skip


def _fewest_ranks(run_layout: Layout, axis: str) -> int:
    """The fewest ranks that keep the behaviour of `run_layout` along `axis`."""
    size = getattr(run_layout, axis)
    if axis == "pp" and is_file(run_layout.schedule):
        return size  # a file is for so many ranks
    if axis == "cp" and run_layout.cp_method == "ring+all-to-all":
        return 4  # two places of a ring, two ranks at each
    return min(part for part in range(2, size + 1) if size % part == 0)


def _subsets(axes: dict[str, int]) -> Iterator[tuple[tuple[str, int], ...]]:
    for count in range(len(axes), -1, -1):
        yield from combinations(axes.items(), count)


def _fits(subset: tuple[tuple[str, int], ...], most: int, *, exactly: bool) -> bool:
    ranks = prod(size for _, size in subset)
    return most % ranks == 0 if exactly else ranks <= most


def _shrink_layout(run_layout: Layout, axes: dict[str, int]) -> Layout:
    """`run_layout` with these axes, and one rank on the others."""
    sizes = {"pp": 1, "cp": 1, "tp": 1, "dp": 1} | axes
    cp_heads = 2 if run_layout.cp_heads > 1 and sizes["cp"] > 1 else 1
    method = run_layout.cp_method if sizes["cp"] > 1 else "ring"
    stages = run_layout.virtual_stages if sizes["pp"] > 1 else 1
    schedule = run_layout.schedule if sizes["pp"] > 1 else Layout.schedule
    same_stages = run_layout.num_stages == sizes["pp"] * stages
    plane = sizes["cp"] * sizes["tp"] * sizes["dp"]
    expert_tp = 2 if run_layout.expert_tp > 1 and plane % 2 == 0 else 1
    return replace(
        run_layout, **sizes, cp_heads=cp_heads, cp_method=method, virtual_stages=stages, schedule=schedule,
        layers_per_stage=run_layout.layers_per_stage if same_stages else None, dp_shard=_shard(run_layout, sizes["dp"]),
        expert_tp=expert_tp, ep=_experts(run_layout, plane // expert_tp),
    )  # fmt: skip


def _experts(run_layout: Layout, plane: int) -> int:
    """Over all of the plane if that was so; else over two ranks."""
    if run_layout.ep == 1:
        return 1
    return plane if run_layout.expert_dp == 1 else 2 if plane % 2 == 0 else 1


def _shard(run_layout: Layout, dp: int) -> int | None:
    """Shard size: several HSDP replicas stay several if possible, with shard groups at most as large as before."""
    if run_layout.dp_shard is None or run_layout.dp_replicate == 1:
        return None
    sizes = [size for size in range(1, run_layout.dp_shard + 1) if dp % size == 0 and size < dp]
    return max(sizes, default=1)


@dataclass(frozen=True)
class Case:
    """A run (in float64, at a size a laptop can do), and the fault planted in it, if any."""

    name: str
    run: Run
    fault: str | None = None
