"""Sampling settings for the next token of a text. Does not import torch, so that invalid numbers are reported before that
import."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ultrascale.description.problems import Problem


@dataclass(frozen=True)
class Sampling:
    """Settings for the choice of the next token."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Number of likeliest tokens to draw from."""
    top_p: float | None = None
    """Nucleus to draw from: only the likeliest tokens that together reach this probability (Holtzman et al. 2020)."""
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the text; not part of it."""

    def problems(self) -> list[Problem]:
        """Problems of the settings; empty if they are valid."""
        broken: list[Problem] = []
        if self.max_new_tokens < 1:
            broken.append(Problem("max_new_tokens", f"must be at least 1, is {self.max_new_tokens}", "Give a positive number."))
        if not 0 <= self.temperature < inf:
            broken.append(
                Problem("temperature", f"must be finite and at least 0, is {self.temperature}", "1 is usual; 0 is greedy.")
            )
        if self.top_k is not None and self.top_k < 1:
            broken.append(Problem("top_k", f"must be at least 1, is {self.top_k}", "Leave it out to draw from all tokens."))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            broken.append(Problem("top_p", f"must be above 0 and at most 1, is {self.top_p}", "0.95 is usual."))
        if not 0 <= self.seed < 2**63:
            broken.append(Problem("seed", f"must be from 0 to 2^63 - 1, is {self.seed}", "Any number of these will do."))
        return broken
