"""The program of a measured run: the stack that its `framework` names, and the settings that its cells state.

Nothing here depends on a source, a year or a release: a stack's file describes its program (`catalogue/stacks`), the row's own
cells give differences (`compile`, `flash_attention`, `stack.KEY`), and settings that neither states and that differ between
runs (`usual`) are open. Statements in a source's text outside the cells are in `stated.toml`, as cells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import Usual, program_of, stack_file, stack_names, with_settings
from ultrascale.description.problems import SpecError
from ultrascale.plan.constants import CONSTANTS, Constants
from ultrascale.plan.laws.devices import POWER_EXPONENT
from ultrascale.validation.cells.models import UnrepresentableError
from ultrascale.validation.rows import RunConfig

WITH_AXES, WITHOUT_AXES = "eager", "torchtitan"
"""Substitutes for an unknown program: with tensor or pipeline parallelism, and without."""
UNFUSED = {"kernels.norm": False, "kernels.rotary": False, "kernels.swiglu": False, "kernels.cross_entropy": "eager"}
"""Norms, RoPE, SwiGLU and the loss as torch's own operations: a program of FSDP2 without torch.compile."""
LIMITED_POWER = 0.75
"""Fraction of a device's power if it is limited to an unknown value: an assumption, reported with the prediction."""
_SCALINGS = {"row": "row", "tensor": "tensor", "current": "tensor", "delayed": "delayed"}
"""Words for a precision, and the resulting granularity of scales (`Kernels.fp8_scaling`)."""
_SELECTIVE = (
    ("save_dot", "wide-products"), ("norm", "elementwise"), ("moe_act", "elementwise"), ("mla_up_proj", "elementwise"),
    ("core", "attention"),
)  # fmt: skip
"""Words of `recompute_detail`, and the recomputation that they mean."""

_LIGER = dict.fromkeys(("kernels.norm", "kernels.rotary", "kernels.swiglu"), True) | {"kernels.cross_entropy": "by-rows"}
_FLASH = {"kernels.attention": "flash", "attention_kernel": "flash", "kernels.masks_in_kernel": True}
_CUDNN = {"kernels.attention": "flash", "attention_kernel": "cudnn"}
_IN_FRAMEWORK: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (rf"(?<!no )(?<!non-)(?<!without )(?<!w/o )\b(?:{words})\b(?!\W{{0,2}}(?:off|disabled)\b)", meant)
    for words, meant in (
        ("liger(?:[-_ ]?kernels?)?", _LIGER),
        ("(?:fa|flash[-_ ]?att[a-z]*)[-_ ]?v?[34]", _FLASH),
        ("cudnn[- ](?:fused[- ])?att[a-z]*", _CUDNN),
    )
)
"""Words of `framework` beside the program's name, and the settings that they mean; the release of a library and what is said to
be off mean none. Liger: what its `apply_liger_kernel_to_*` replaces by default."""


@dataclass(frozen=True)
class Tuning:
    """All numbers of the time model that are fitted to whole runs, so that others can be tried."""

    constants: Constants = CONSTANTS
    shared: Mapping[str, float] = field(default_factory=dict)
    """Values of settings that several stacks share, by their name in the stacks' files (`shared = "eager launches"`)."""
    without: frozenset[str] = frozenset()
    """Sources to exclude: neither their statements nor stacks that only they validate are used."""


TUNING = Tuning()


@dataclass(frozen=True)
class RowProgram:
    """The program that a row may refer to."""

    stacks: tuple[Stack, ...]
    """One stack; several if settings are open."""
    usual: Usual
    open_settings: tuple[str, ...]
    assumed: tuple[str, ...]


def program_of_row(config: RunConfig, tuning: Tuning = TUNING) -> RowProgram:
    """The row's program. Raises UnrepresentableError for an unknown stack or setting."""
    assumed: list[str] = []
    file = stack_file(_name(config, tuning, assumed))
    shared = {key: tuning.shared[name] for key, name in file.shared.items() if name in tuning.shared}
    try:
        settings = _of_cells(config, file.stack, assumed) | dict(config.settings)
        stack = with_settings(with_settings(file.stack, shared), settings)
    except SpecError as error:
        raise UnrepresentableError("; ".join(f"{problem.key} {problem.rule}" for problem in error.problems)) from None
    choices = file.usual.open_settings(config.precision.lower())
    choices = {key: values for key, values in choices.items() if key not in settings}
    if not config.experts:
        choices.pop("dispatcher", None)
    stacks = tuple(with_settings(stack, dict(zip(choices, values, strict=True))) for values in product(*choices.values()))
    return RowProgram(stacks, file.usual, tuple(key for key, values in choices.items() if len(values) > 1), tuple(assumed))


def _name(config: RunConfig, tuning: Tuning, assumed: list[str]) -> str:
    if config.stack:
        if config.stack not in stack_names():
            raise UnrepresentableError(f"stack {config.stack!r} is not one of {', '.join(stack_names())}")
        return config.stack
    closest = program_of(config.framework, tuning.without) if config.framework else None
    if closest is not None:
        if not closest[1]:
            assumed.append(f"stack {closest[0]}, the closest to {config.framework}")
        return closest[0]
    is_model_parallel = (config.tp or 1) > 1 or (config.pp or 1) > 1
    name = WITH_AXES if is_model_parallel else WITHOUT_AXES
    assumed.append(f"stack {name}, as {'tp or pp is used' if is_model_parallel else 'only data parallelism is used'}")
    return name


def _of_cells(config: RunConfig, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Settings that the row's own columns state."""
    settings: dict[str, Any] = {}
    for words, meant in _IN_FRAMEWORK:
        if re.search(words, config.framework, re.IGNORECASE):
            settings |= meant
    if config.compile is not None:
        settings["kernels.compiled"] = config.compile
        if not config.compile and stack.kernels.compiled:
            settings |= UNFUSED
    if config.flash_attention is False:
        settings |= {"kernels.attention": "math", "kernels.masks_in_kernel": False}
    scales = next((scaling for word, scaling in _SCALINGS.items() if word in config.precision.lower()), None)
    if scales:
        settings["kernels.fp8_scaling"] = scales
    detail = config.recompute_detail.lower()
    settings |= next(({"selective": modules} for word, modules in _SELECTIVE if word in detail), {})
    if re.search(r"power.?(?:limited|capped)", config.gpu, re.IGNORECASE):
        settings["overheads.products"] = stack.overheads.products * LIMITED_POWER**-POWER_EXPONENT  # attention too
        assumed.append("three quarters of its power, as the GPU is said to be limited")
    return settings


def stated_cells(config: RunConfig, stated: Mapping[str, Any]) -> RunConfig:
    """The row with cells that its source states elsewhere; the row's own cells take precedence."""
    row_settings = dict(config.settings)
    settings = {key.removeprefix("stack."): value for key, value in stated.items() if key.startswith("stack.")}
    cells = {key: value for key, value in stated.items() if not key.startswith("stack.") and not getattr(config, key)}
    return replace(config, **cells, settings=tuple(sorted((settings | row_settings).items())))
