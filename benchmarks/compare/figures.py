"""From raw times to medians, ratios and verdicts. Pure.

A *run* is one fresh set of processes; its figure is the median of its rounds, each round taking
as long as its slowest worker. Runs of different contenders alternate, so that the first of one
and the first of another are a pair: ratios are formed pair by pair, and their median counts. That
way a machine that becomes slower in the middle changes both sides of a ratio alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Runs = Mapping[str, Sequence[float]]
"""The figure of every run, in milliseconds, by contender."""


class Summary(NamedTuple):
    """A median with its spread."""

    median: float
    least: float
    greatest: float
    number: int

    def text(self, digits: int = 3) -> str:
        """Such as ``12.3 (11.9 to 14.0)``, with so many significant digits."""
        median, least, greatest = (significant(x, digits) for x in self[:3])
        return median if self.number == 1 else f"{median} ({least} to {greatest})"


def summary(values: Sequence[float]) -> Summary:
    """Of at least one value."""
    return Summary(statistics.median(values), min(values), max(values), len(values))


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent: 0.0123, 1.23, 123, 1230."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, decimals)}f}"


def slowest(times_of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Time of each round: that of the worker for which it took longest."""
    return [max(of_round) for of_round in zip(*times_of_ranks, strict=True)]


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times as long theirs took, pair by pair; an unpaired rest is left out."""
    return [their / our for our, their in zip(ours, theirs, strict=False)]


@dataclass(frozen=True)
class Ask:
    """``of`` must be ``ratio`` times as fast as the fastest of ``to``."""

    of: str
    to: tuple[str, ...]
    ratio: float


@dataclass(frozen=True)
class Verdict:
    """What a run says of an ask; ``ratio`` is None where one side was not measured."""

    ask: Ask
    to: str
    """The contender that it was compared with, or all that were asked for."""
    ratio: Summary | None
    holds: bool | None

    @property
    def word(self) -> str:
        return "not measured" if self.holds is None else "yes" if self.holds else "NO"


def verdict(ask: Ask, runs: Runs, wrong: Sequence[str] = ()) -> Verdict:
    """Judge one ask. A contender among ``wrong`` has computed wrong weights: it is no peer, and
    when it is ours the ask does not hold."""
    measured = [name for name in ask.to if runs.get(name) and name not in wrong]
    if not measured or not runs.get(ask.of):
        return Verdict(ask, " or ".join(ask.to), None, None)
    best = min(measured, key=lambda name: statistics.median(runs[name]))
    ratio = summary(paired_ratios(runs[ask.of], runs[best]))
    return Verdict(ask, best, ratio, ratio.median >= ask.ratio and ask.of not in wrong)
