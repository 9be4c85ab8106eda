"""Whether answers can be trusted: confidence against accuracy, and doubt of right and of wrong answers.

Bins of several seeds are pooled: counts add up, confidence and accuracy are their means weighted by count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..evaluate.calibration import Reliability
from .groups import Group
from .pictures import INK, MUTED, RIGHT, TOO_SURE, WRONG, Picture, panel, short, tag
from .read import PARTS, Doubt


def pooled_bins(diagrams: Sequence[Reliability]) -> Reliability | None:
    """Return one diagram of all samples of several; None where there is none, or their bins differ."""
    if not _alike(diagrams):
        return None
    count = np.stack([each.count for each in diagrams])
    total = count.sum(0)
    share = count / np.maximum(total, 1)
    confidence = (share * np.stack([each.confidence for each in diagrams])).sum(0)
    accuracy = (share * np.stack([each.accuracy for each in diagrams])).sum(0)
    return Reliability(diagrams[0].edges, total, confidence, accuracy)


def _alike(found: Sequence[Reliability | Doubt]) -> bool:
    """Whether there are some, and all have the same bins."""
    return bool(found) and all(np.array_equal(each.edges, found[0].edges) for each in found)


def pooled_doubt(histograms: Sequence[Doubt]) -> Doubt | None:
    """Return one histogram of all answers of several; None where there is none, or their bins differ."""
    if not _alike(histograms):
        return None
    return Doubt(histograms[0].edges, *(sum(getattr(each, name) for each in histograms) for name in ("right", "wrong")))


def diagrams(groups: Sequence[Group], part: str) -> Iterator[Picture]:
    """Draw the reliability diagram of every group that has one."""
    for group in groups:
        bins = pooled_bins([run.details.reliability[part] for run in group.runs if part in run.details.reliability])
        if bins is not None and bins.count.sum():
            errors = group.numbers(part, "ece_top1")
            said = f"ECE {100 * sum(errors) / len(errors):.1f} %" if errors else ""
            yield Picture(
                f"reliability-{part}-{tag(group)}",
                f"Reliability diagram of {group.name} for {PARTS[part]} clients; {said}",
                _diagram(group, bins, said),
            )


def _diagram(group: Group, bins: Reliability, said: str) -> Figure:
    """Draw accuracy, split where confidence ends, or filled up to it; and below how many answers each bin has."""
    figure = Figure(figsize=(2.9, 3.3), layout="constrained")
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    axes.set_title(short(group.name, 26))
    middle, width = bars(axes, bins, group.look.colour)
    axes.text(0.04, 0.96, said, va="top", color=MUTED, size=8.5)
    axes.set_ylabel("accuracy")
    below.bar(middle, 100 * bins.count[bins.count > 0] / bins.count.sum(), width, color=MUTED)
    below.set(xlabel="confidence", ylabel="% of rows")
    below.grid(visible=False, axis="x")
    return figure


def bars(axes: Axes, bins: Reliability, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw a diagram's bars on a square from 0 to 1; return middles and widths of the bins that hold something."""
    full = bins.count > 0
    width = np.diff(bins.edges)[full] * 0.88
    middle = (bins.edges[1:] + bins.edges[:-1])[full] / 2
    accuracy, confidence = bins.accuracy[full], bins.confidence[full]
    both = np.minimum(accuracy, confidence)
    axes.bar(middle, both, width, color=colour)
    axes.bar(middle, accuracy - both, width, bottom=both, color=colour, alpha=0.35)
    sure = confidence > accuracy
    axes.bar(middle[sure], (confidence - both)[sure], width[sure], bottom=both[sure], facecolor="none",
             edgecolor=TOO_SURE, linewidth=0.7, hatch="//////")  # fmt: skip
    axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    return middle, width


def doubts(groups: Sequence[Group], part: str) -> Iterator[Picture]:
    """Draw how unsure right and wrong answers are, of every group that has it."""
    for group in groups:
        doubt = pooled_doubt([run.details.entropy[part] for run in group.runs if part in run.details.entropy])
        if doubt is None or not doubt.right.sum() + doubt.wrong.sum():
            continue
        told = group.numbers(part, "auroc_wrong")
        said = f"AUROC {sum(told) / len(told):.2f}" if told else ""
        figure, axes = panel(short(group.name, 26), width=2.9, height=2.4)
        for counts, colour, name in ((doubt.right, RIGHT, "right"), (doubt.wrong, WRONG, "wrong")):
            if counts.sum():
                shares = 100 * counts / counts.sum()
                axes.stairs(shares, doubt.edges, fill=True, color=colour, alpha=0.3)
                axes.stairs(shares, doubt.edges, color=colour, linewidth=1.3, label=f"{name}: {counts.sum():,.0f}")
        axes.set(xlim=(0, doubt.edges[-1]), xlabel="entropy of the answer, nats", ylabel="% of them")
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 100])
        axes.set_ylim(0, 1.7 * axes.dataLim.ymax)  # room for the legend
        axes.legend(loc="upper right", title=said or None, title_fontsize=8)
        yield Picture(
            f"entropy-{part}-{tag(group)}",
            f"Entropy of right and of wrong answers of {group.name}, {PARTS[part]} clients; {said}",
            figure,
        )
