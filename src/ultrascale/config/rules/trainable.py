"""Layouts and models that can be planned but not yet trained; commands that start a run refuse them."""

from __future__ import annotations

from collections.abc import Iterator

from ultrascale.config.choices import choice_problems, expect_choices
from ultrascale.config.rules.rule import Rule
from ultrascale.description.architecture.families import TRAINED
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import NARROW, Layout
from ultrascale.description.problems import Problem, expect_none
from ultrascale.description.recomputed import is_modules
from ultrascale.description.run import Run
from ultrascale.description.schedules import USUAL

_PLANNED = "`ultrascale plan` handles it."


def untrainable_layout(layout: Layout) -> list[Problem]:
    """Reasons why the trainer cannot run `layout` yet, one problem per field; empty if it can. Planning is not affected."""
    return [problem for rule in LAYOUT_RULES for problem in rule.check(layout)]


def untrainable(model: Model, layout: Layout) -> list[Problem]:
    """Everything in `model` and `layout` that can be planned but not trained."""
    return [*untrainable_model(model), *untrainable_layout(layout)]


def _offloaded_results(layout: Layout) -> Iterator[Problem]:
    """Results that selective recomputation keeps are not offloaded."""
    if layout.offload_activations and _keeps_results(layout):
        rule = "keeps results apart from what autograd saves, and layout.offload_activations does not send those to the host"
        yield Problem("layout.recompute", rule, _remedy('"full", "every-k" or "none"'))


def _uncut_pieces(layout: Layout) -> Iterator[Problem]:
    """Feed-forward layers in chunks exclude tp, split backward passes, selective recomputation and fp8."""
    if layout.mlp_chunks == 1:
        return
    known = layout.known_schedule
    split = known is not None and known.splits_backward != ""
    beside = [
        (layout.tp > 1, f"tp = {layout.tp}", "cp, which cuts long sequences too"),
        (split, f"schedule = {layout.schedule}", f'schedule = "{USUAL}"'),
        (_keeps_results(layout), f"recompute = {layout.recompute}", 'recompute = "full" or "none"'),
        (layout.precision == "fp8", "precision = fp8", 'precision = "bf16"'),
    ]
    for holds, what, nearest in beside:
        if holds:
            rule = f"the trainer runs feed-forward layers in pieces without {what} only so far"
            yield Problem("layout.mlp_chunks", rule, _remedy(nearest))


def _offloaded_partitions(layout: Layout) -> Iterator[Problem]:
    """The input of a block is sharded over tp or offloaded, not both."""
    if layout.partition_checkpoints and layout.offload_activations:
        rule = "the trainer cuts a block's input over tp or sends it to the host so far, not both"
        yield Problem("layout.partition_checkpoints", rule, _remedy("offload_activations alone"))


def _narrow(layout: Layout) -> Iterator[Problem]:
    """fp8 is the only narrow precision that the trainer supports, and not with `tp_overlap`."""
    if layout.precision == "fp8" and layout.tp > 1 and layout.tp_overlap:
        rule = "products of fp8 do not run beside their messages so far"
        yield Problem("layout.tp_overlap", rule, _remedy("without it"))
    elif layout.precision != "fp8" and layout.precision in NARROW:
        rule = f"is {layout.precision}, whose scales of blocks the trainer does not make; fp8 is the nearest it has"
        remedy = 'Use layout.precision = "fp8"; `ultrascale plan --stack megatron` handles it.'
        yield Problem("layout.precision", rule, remedy)


LAYOUT_RULES: tuple[Rule[Layout], ...] = (
    Rule(("layout.recompute", "layout.recompute_blocks", "layout.offload_activations"), _offloaded_results),
    Rule(("layout.mlp_chunks", "layout.tp", "layout.schedule", "layout.recompute", "layout.recompute_blocks",
          "layout.precision"), _uncut_pieces),
    Rule(("layout.partition_checkpoints", "layout.offload_activations"), _offloaded_partitions),
    Rule(("layout.precision", "layout.tp_overlap", "layout.tp"), _narrow),
)  # fmt: skip
"""Rules for layouts that are to be trained."""


def _keeps_results(layout: Layout) -> bool:
    """True if some block keeps results for selective recomputation, or may do so (`auto`)."""
    modes = (layout.recompute, *layout.recompute_blocks)
    return layout.recompute == "auto" or any(text.startswith("selective") or is_modules(text) for text in modes)


def untrainable_model(model: Model) -> list[Problem]:
    """Reasons why the trainer cannot run `model` yet, one problem per feature; empty if it can. Planning is not affected."""
    if model.model_type in TRAINED:
        return []
    rule = f"the trainer runs {', '.join(TRAINED)} only so far, is {model.model_type}"
    return [Problem("model.model_type", rule, _remedy("choose one of them"))]


def expect_trainable(model: Model, layout: Layout | None = None) -> None:
    """Raises SpecError with every unknown choice in `model` and `layout`, or else everything that can be planned but not
    trained."""
    layout = layout or Layout()
    unknown = [*choice_problems(model, "model."), *choice_problems(layout, "layout.")]
    expect_none(unknown or untrainable(model, layout))


def expect_trainable_run(run: Run) -> None:
    """Raises SpecError with every unknown choice of `run`, or else everything that can be planned but not trained."""
    expect_choices(run)
    expect_trainable(run.model, run.layout)


def _remedy(nearest: str) -> str:
    return f"{_PLANNED} Nearest that runs: {nearest}."
