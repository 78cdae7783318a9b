"""A budget as an input: the training that an amount of money, a number of days or the time to a date buys on a cluster.

    $1M, 250k$           at the list price of the accelerators, all busy
    30d, 30 days, 36h    of wall-clock time
    2027-03-01           from now until then

Tokens are those of the planned run at its planned speed. In addition, the dense model for which the same FLOPs are
compute-optimal, at 20 tokens per parameter (Hoffmann et al. 2022): 6 N x 20 N = FLOPs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime
from typing import TYPE_CHECKING

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_active_parameters, num_parameters
from ultrascale.description.problems import Problem
from ultrascale.description.units import UnitError, format_count, parse_seconds, parse_tokens

if TYPE_CHECKING:
    from ultrascale.plan.time.price import Prediction

REMEDY = "Write $1M, 30d or 2027-03-01."
TOKENS_PER_PARAMETER = 20
_MONEY = re.compile(r"\$\s*([\d.,_]+\s*[kKMB]?)|([\d.,_]+\s*[kKMB]?)\s*(?:\$|usd|dollars?)", re.IGNORECASE)
_CURRENCY = re.compile(
    r"[€£¥₹]|\b\d*[\d.,_]*\s*[kKMB]?\s*(?:EUR|GBP|JPY|CNY|RMB|CHF|INR|euros?|pounds?|yen|yuan)\b", re.IGNORECASE
)
_DAYS = re.compile(r"([\d.]+)\s*(d|days?|w|weeks?|months?)", re.IGNORECASE)
_IN_DAYS = {"d": 1, "w": 7, "m": 30}


@dataclass(frozen=True)
class Budget:
    """Budget of a training run: seconds of wall-clock time, or dollars."""

    text: str
    seconds: float | None = None
    dollars: float | None = None


@dataclass(frozen=True)
class Bought:
    """Training that a budget buys."""

    seconds: float
    tokens: float
    tokens_per_parameter: float
    """Tokens per parameter that one token activates."""
    optimal_parameters: float
    """Parameters of the dense model that the same FLOPs train with 20 tokens per parameter."""


def parse_budget(text: str, *, now: datetime | None = None) -> Budget:
    """Budget given by `text`. Raises UnitError with the expected form."""
    stripped, now = text.strip(), now or datetime.now()
    if money := _MONEY.fullmatch(stripped):
        try:
            amount = float(parse_tokens((money[1] or money[2]).upper().replace("K", "k")))
        except UnitError:
            raise UnitError(f"expected whole dollars, found {text!r}") from None
        return Budget(stripped, dollars=_positive(amount, text))
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", stripped):
        try:
            until = datetime.combine(date.fromisoformat(stripped), datetime.min.time())
        except ValueError:
            raise UnitError(f"expected a date such as 2027-03-01, found {text!r}, which no calendar has") from None
        if until <= now:
            raise UnitError(f"expected a date that is to come, found {text!r}")
        return Budget(stripped, seconds=(until - now).total_seconds())
    if days := _DAYS.fullmatch(stripped):
        return Budget(stripped, seconds=_positive(float(days[1]) * _IN_DAYS[days[2][0].lower()] * 86400, text))
    if _CURRENCY.search(stripped):
        raise UnitError(f"expected dollars, in which the catalogue has its prices, found {text!r}")
    try:
        return Budget(stripped, seconds=float(parse_seconds(stripped)))
    except UnitError:
        raise UnitError(f"expected money, a time or a date, found {text!r}") from None


def tokens_to_train(model: Model, tokens: int | None) -> tuple[int, str]:
    """Number of tokens to train on, and `, ` with the reason: `tokens`, without one, or else 20 per parameter, with experts per
    active parameter."""
    if tokens:
        return tokens, ""
    if not model.num_experts:
        return TOKENS_PER_PARAMETER * num_parameters(model), ", 20 a parameter (Hoffmann et al. 2022)"
    active = num_active_parameters(model)
    why = f", 20 for each of the {format_count(active)} active parameters (Hoffmann et al. 2022, of dense models)"
    return TOKENS_PER_PARAMETER * active, why


def budget_problems(text: str | None) -> list[Problem]:
    """Problems of the text of `--budget`; none if it is absent or valid."""
    try:
        if text is not None:
            parse_budget(text)
    except (UnitError, ValueError) as error:
        return [Problem("--budget", str(error), REMEDY)]
    return []


def bought(budget: Budget, prediction: Prediction) -> Bought | None:
    """Training that the budget buys on the cluster of `prediction`, at its speed; None for dollars if no price is listed."""
    workload, layout = prediction.workload, prediction.layout
    seconds = budget.seconds
    if seconds is None:
        price = workload.accelerator.dollars_per_hour
        if price is None or budget.dollars is None:
            return None
        seconds = budget.dollars / (price.value * layout.world_size) * 3600
    from ultrascale.plan.flops import model_flops_per_token

    tokens = seconds * prediction.tokens_per_second
    flops = tokens * model_flops_per_token(workload.model, workload.sequence_length)
    optimal = (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5
    return Bought(seconds, tokens, tokens / num_active_parameters(workload.model), optimal)


def _positive(amount: float, text: str) -> float:
    if not 0 < amount < float("inf"):
        raise UnitError(f"expected more than nothing, found {text!r}")
    return amount
