"""What the trainer runs so far, of all that can be described and planned. Whoever starts something refuses the rest."""

from __future__ import annotations

from collections.abc import Iterator

from ultrascale.spec.layout import NARROW, Layout
from ultrascale.spec.model import Model
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.recomputed import is_modules

TRAINED_FAMILIES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3",
    "gpt_oss",
)  # fmt: skip
_PLANNED = "`ultrascale plan` handles it."
_TWO_COPIES = "dualpipe"


def untrainable_layout(layout: Layout) -> list[Problem]:
    """Why the trainer cannot run `layout` yet, one problem per field; empty if it can. Planning is not affected."""
    found: list[Problem] = []
    if layout.offload_activations and _keeps_results(layout):
        rule = "keeps results apart from what autograd saves, and layout.offload_activations does not send those to the host"
        found.append(Problem("layout.recompute", rule, _remedy('"full", "every-k" or "none"')))
    found += _uncut_pieces(layout)
    if layout.partition_checkpoints and layout.offload_activations:
        rule = "the trainer cuts a block's input over tp or sends it to the host so far, not both"
        found.append(Problem("layout.partition_checkpoints", rule, _remedy("offload_activations alone")))
    if layout.pp > 1 and layout.schedule == _TWO_COPIES:
        rule = "is dualpipe, with every block on two ranks of a pipeline: copies are dp's, a pipeline holds each once"
        found.append(Problem("layout.schedule", rule, _remedy("dualpipe-v, the same order of passes with one copy")))
    if layout.precision == "fp8":
        found += _unready_for_fp8(layout)
    elif layout.precision in NARROW:
        rule = f"is {layout.precision}, whose scales of blocks the trainer does not make; fp8 is the nearest it has"
        remedy = 'Use layout.precision = "fp8"; `ultrascale plan --stack megatron` handles it.'
        found.append(Problem("layout.precision", rule, remedy))
    return found


def _uncut_pieces(layout: Layout) -> Iterator[Problem]:
    """What feed-forward layers in pieces do not go with so far."""
    if layout.mlp_chunks == 1:
        return
    split = layout.pp > 1 and layout.schedule in ("zb-h1", "zb-v", "dualpipe", "dualpipe-v")
    beside = [
        (layout.tp > 1, f"tp = {layout.tp}", "cp, which cuts long sequences too"),
        (split, f"schedule = {layout.schedule}", 'schedule = "1f1b"'),
        (_keeps_results(layout), f"recompute = {layout.recompute}", 'recompute = "full" or "none"'),
        (layout.precision == "fp8", "precision = fp8", 'precision = "bf16"'),
    ]
    for holds, what, nearest in beside:
        if holds:
            rule = f"the trainer runs feed-forward layers in pieces without {what} only so far"
            yield Problem("layout.mlp_chunks", rule, _remedy(nearest))


def _unready_for_fp8(layout: Layout) -> list[Problem]:
    if layout.tp == 1 or not layout.tp_overlap:
        return []
    rule = "products of fp8 do not run beside their messages so far"
    return [Problem("layout.tp_overlap", rule, _remedy("without it"))]


def _keeps_results(layout: Layout) -> bool:
    """Whether some block is recomputed selectively, or may be."""
    ways = (layout.recompute, *layout.recompute_blocks)
    return layout.recompute == "auto" or any(text.startswith("selective") or is_modules(text) for text in ways)


def untrainable_model(model: Model) -> list[Problem]:
    """Why the trainer cannot run `model` yet, one problem per feature; empty if it can. Planning is not affected."""
    if model.model_type in TRAINED_FAMILIES:
        return []
    rule = f"the trainer runs {', '.join(TRAINED_FAMILIES)} only so far, is {model.model_type}"
    return [Problem("model.model_type", rule, _remedy("choose one of them"))]


def expect_trainable(model: Model, layout: Layout | None = None) -> None:
    """Raises SpecError with everything in `model` and `layout` that can be planned but not run."""
    problems = untrainable_model(model)
    if layout is not None:
        problems += untrainable_layout(layout)
    if problems:
        raise SpecError(problems)


def _remedy(nearest: str) -> str:
    return f"{_PLANNED} Nearest that runs: {nearest}."
