"""A picture of a comparison: bars for the contenders of each row. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.contenders import CONTENDERS
from benchmarks.compare.figures import significant, summary
from benchmarks.compare.measure import RowResult

OURS, THEIRS = "#1f77b4", "#b0b0b0"


def draw(outcomes: Sequence[RowResult], path: Path) -> str:
    """Write the picture, in the format of the file's ending; returns a sentence for the user."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"{path} was not drawn: matplotlib is missing (pip install matplotlib)"
    drawn = [outcome for outcome in outcomes if any(r.runs for r in outcome.results.values())]
    if not drawn:
        return f"{path} was not drawn: nothing was measured"
    heights = [1 + sum(bool(result.runs) for result in one.results.values()) for one in drawn]
    figure = Figure(figsize=(9, 0.32 * sum(heights) + 1.2), layout="constrained")
    axes = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
    for one, axis in zip(drawn, axes, strict=True):
        _bars(one, axis)
    axes[-1].set_xlabel("milliseconds for one exchange; median of runs, least to greatest")
    figure.savefig(path)
    return f"drawn: {path}"


def _bars(outcome: RowResult, axis: Any) -> None:
    measured = [(name, result) for name, result in outcome.results.items() if result.runs]
    for place, (name, result) in enumerate(measured):
        found = summary(result.medians_ms)
        error = [[found.median - found.least], [found.greatest - found.median]]
        color = OURS if name.startswith("ours") else THEIRS
        axis.barh(place, found.median, xerr=error, color=color, capsize=2)
        axis.text(found.greatest, place, f"  {significant(found.median)}", va="center", fontsize=8)
    axis.set_yticks(range(len(measured)), [CONTENDERS[name].title for name, _ in measured])
    axis.invert_yaxis()
    axis.set_title(outcome.row.title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.12)
