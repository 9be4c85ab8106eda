"""Draw docs/picture.png, the figure of the README, from the folder that `metavd compare` wrote.

    metavd compare fedavg reptile reptile+metavd --seeds 3 --out runs/picture
    python scripts/picture.py runs/picture docs/picture.png

Left: accuracy over rounds. Middle: every client's accuracy at the end. Right: the dropout rates that MetaVD learned.
"""

from __future__ import annotations

import argparse
import io
import tomllib
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from PIL import Image

from metavd.engine.checkpoint import load_checkpoint
from metavd.runs.settings import Experiment
from metavd.runs.setup import prepare
from metavd.runs.store import Store

METHODS = ("fedavg", "reptile", "reptile+metavd")
COLOURS = dict(zip(METHODS, ("#9a9a9a", "#3b78b5", "#d1602b"), strict=True))
GROUPS = {"test": ("-", "o"), "unseen": ((0, (3, 1.6)), "D")}
NAMES = {"test": "participating", "unseen": "never seen"}
DROP = 0.9
"""Threshold above which +drop drops a weight."""


def runs_of(folder: Path, method: str) -> list[Store]:
    """Return the finished runs of a method, one for each seed."""
    stores = [Store(path) for path in sorted((folder / method).glob("seed-*"))]
    if not stores or not all(store.is_finished() for store in stores):
        raise SystemExit(f"{folder / method} holds no finished runs; run metavd compare first, see --help")
    return stores


def curve(stores: Sequence[Store], group: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the evaluated rounds and the accuracies (seeds, rounds) in percent."""
    lines = [
        {each["round"]: each[group]["accuracy"] for each in store.evaluations(store.read_result())} for store in stores
    ]
    rounds = sorted(lines[0])
    return np.array(rounds), 100 * np.array([[line[r] for r in rounds] for line in lines])


def clients(stores: Sequence[Store], group: str) -> np.ndarray:
    """Return (accuracy in percent, training rows) of every client with test rows, of all seeds."""
    rows = [row for store in stores for row in store.read_clients() if row["accuracy"]]
    wanted = [row for row in rows if (row["unseen"] == "1") == (group == "unseen")]
    return np.array([(100 * float(row["accuracy"]), float(row["train_size"])) for row in wanted])


def learned_rates(store: Store) -> np.ndarray:
    """Return the dropout rates (clients, weights) that the server predicts after the last round."""
    config = tomllib.loads(store.config.read_text())
    setup = prepare(Experiment(**config))
    found = load_checkpoint(store.checkpoint)
    if found is None:
        raise SystemExit(f"{store.folder} has no checkpoint")
    state, _ = found
    noise = setup.algorithm.posterior
    if noise is None:
        raise SystemExit(f"{config['method']} has no dropout rates")
    each = []
    with torch.no_grad():
        for client in range(setup.experiment.clients):
            received = setup.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
            each.append(torch.cat([rate.flatten() for rate in noise.rates(received).values()]).numpy())
    return np.stack(each)


def draw_curves(ax: Axes, folder: Path) -> None:
    """Accuracy over rounds: a line for the mean over seeds, a band from the lowest to the highest seed."""
    for method in METHODS:
        for group, (dash, _) in GROUPS.items():
            rounds, values = curve(runs_of(folder, method), group)
            ax.plot(rounds, values.mean(0), color=COLOURS[method], linestyle=dash, linewidth=1.9, zorder=3)
            if group == "test":
                ax.fill_between(
                    rounds, values.min(0), values.max(0), color=COLOURS[method], alpha=0.15, linewidth=0, zorder=1
                )
    ax.set(xlabel="round", ylabel="accuracy (%)", title="Accuracy while training", ylim=(40, 100))
    ax.set_xlim(0, rounds[-1])
    ax.legend(
        handles=[*(Line2D([], [], color=COLOURS[m], linewidth=2.2, label=m) for m in METHODS[::-1]),
                 *(Line2D([], [], color="#444444", linestyle=GROUPS[g][0], label=f"{NAMES[g]} clients")
                   for g in GROUPS)],
        loc="lower right",
    )  # fmt: skip


def spread_out(values: np.ndarray, step: float, bin_width: float) -> np.ndarray:
    """Return sideways places, so that dots of about one height stand beside each other instead of on each other."""
    places = np.zeros(len(values))
    for level in np.unique(np.round(values / bin_width)):
        members = np.flatnonzero(np.round(values / bin_width) == level)
        width = min(step * (len(members) - 1), 0.72)
        places[members] = np.linspace(-width / 2, width / 2, len(members)) if len(members) > 1 else 0.0
    return places


def draw_clients(ax: Axes, folder: Path) -> None:
    """One dot for each client, and a bar at the mean weighted by training rows."""
    ticks = []
    for column, (group, method) in enumerate((g, m) for g in GROUPS for m in METHODS):
        place = column + (0.5 if group == "unseen" else 0.0)
        points = clients(runs_of(folder, method), group)
        places = place + spread_out(points[:, 0], 0.1, 2.5)
        ax.scatter(places, points[:, 0], s=13, marker=GROUPS[group][1], color=COLOURS[method], alpha=0.55,
                   linewidth=0, zorder=2)  # fmt: skip
        mean = np.average(points[:, 0], weights=points[:, 1])
        ax.plot([place - 0.4, place + 0.4], [mean, mean], color="#222222", linewidth=1.8, zorder=3)
        ax.annotate(f"{mean:.0f} %", (place, 63), ha="center", fontsize=9, color=COLOURS[method], weight="bold")
        ticks.append(place)
    ax.axvline((ticks[2] + ticks[3]) / 2, color="#dddddd", linewidth=1)
    ax.set_xticks([ticks[1], ticks[4]], [f"{NAMES[group]} clients" for group in GROUPS])
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel="accuracy of a client (%)", title="Every client at the end", ylim=(60, 102))
    ax.set_yticks(range(60, 101, 10))


def draw_rates(ax: Axes, folder: Path) -> None:
    """Share of weights with at most that dropout rate: a thin line for each client, a thick one for all."""
    values = learned_rates(runs_of(folder, "reptile+metavd")[0])
    colour = COLOURS["reptile+metavd"]
    share = np.linspace(0, 100, values.shape[1])
    for each in values:
        ax.plot(np.sort(each), share, color=colour, alpha=0.35, linewidth=0.8)
    whole = np.sort(values, axis=None)
    ax.plot(whole[:: len(values)], share, color=colour, linewidth=2.2)
    ax.axvspan(DROP, 1, color=colour, alpha=0.1, linewidth=0)
    above = 100 * float((values > DROP).mean())
    ax.annotate(f"{above:.0f} % of the weights have a rate\nabove {DROP}: +drop would drop them", xy=(DROP, 62),
                xytext=(0.05, 62), va="center", fontsize=9, color="#333333",
                arrowprops={"arrowstyle": "->", "color": "#777777", "shrinkB": 0})  # fmt: skip
    count = f"{values.shape[1]:,}"
    ax.set(xlabel="dropout rate of a weight", ylabel="weights with at most that rate (%)", xlim=(0, 1), ylim=(0, 100),
           title=f"Dropout rates learned ({count} weights)")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Read the runs, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the --out folder of metavd compare")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    arguments = parser.parse_args(argv)
    plt.rcParams.update({
        "font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
        "axes.axisbelow": True, "grid.color": "#e6e6e6", "legend.frameon": False, "legend.fontsize": 8.5,
        "axes.titlepad": 9, "axes.edgecolor": "#555555",
    })  # fmt: skip
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.6, 4.1), layout="constrained",
                                                 gridspec_kw={"width_ratios": [1, 1.15, 1]})  # fmt: skip
    draw_curves(left, arguments.runs)
    draw_clients(middle, arguments.runs)
    draw_rates(right, arguments.runs)
    first = runs_of(arguments.runs, METHODS[0])
    result = first[0].read_result()
    figure.supxlabel(
        f"{result['data']}: {result['test']['clients']} participating and {result['unseen']['clients']} never seen "
        f"clients, {result['rounds']} rounds, {len(first)} seeds. Left: mean over seeds, bands from lowest to highest. "
        "Middle: a dot is a client, a bar the mean. Right: first seed, a thin line is a client.",
        fontsize=8, color="#666666", x=0.005, ha="left",
    )  # fmt: skip
    # Equal runs give an equal file: nothing of a version or a time is kept.
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    # A palette, since a clone shall stay light.
    Image.open(drawn).convert("RGB").quantize(128).save(arguments.picture, optimize=True)
    print(f"wrote {arguments.picture}, {arguments.picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
