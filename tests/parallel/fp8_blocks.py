"""Shares whose blocks multiply in fp8 inside a run of another precision: float64 between products, where nothing tips over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ultrascale.description.layout import Layout
from ultrascale.parallel import apply
from ultrascale.parallel.precision.fp8_gather import gather_in_fp8
from ultrascale.parallel.precision.fp8_products import apply_fp8

WORDS = ("precision", "fp8_scaling", "fp8_amax_history_len", "fp8_all_gather")


@contextmanager
def blocks_as_in(layout: Layout) -> Iterator[None]:
    """Blocks of shares that are built here multiply, and gather weights, as those of `layout` do."""
    words = {name: getattr(layout, name) for name in WORDS}

    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*(replace(one, **words) if isinstance(one, Layout) else one for one in given))

    with (
        patch.object(apply, "apply_fp8", changed(apply_fp8)),
        patch.object(apply, "gather_in_fp8", changed(gather_in_fp8)),
    ):
        yield
