"""What ranks do in tests/engine/test_ranks.py: many small runs; under torchrun, one that may die."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import metavd
from cheap import cheap
from metavd.core import owned
from metavd.engine.ranks import Ranks
from metavd.engine.rounds import Silent

CHEAP = {"batch": 8, "server_share": 0.1, "drop_from": 1, "threshold": 0.2, "hyper_width": 4}
FIELDS = {"clients": 4, "unseen": 1, "cohort": 4, "rounds": 2, "model": "mlp", "width": 4, "partition": "quantity:1.0",
          "test_share": 0.8}  # fmt: skip
MANY = owned.MANY
SOME = ("fedavg", "reptile+metavd+drop", "perfedavg+vd", "fedrep", "scaffold", "pfedgp", "fedbe")
VARIANTS: tuple[dict[str, Any], ...] = (
    {"method": "reptile+metavd", "aggregate": "median"},
    {"method": "fedavg", "aggregate": "multi-krum:0", "attack": "sign-flip:0.2"},
    {"method": "reptile+metavd+dp", "noise": 0.5},
    {"method": "perfedavg+prior"},
    {"method": "reptile+metavd", "part": 2},
    {"method": "fedrep", "part": 3},
    {"method": "fedrep", "part": 3, "chunk": 2},
    {"method": "reptile+metavd", "part": 3, "chunk": 2, "aggregate": "trimmed:0.3"},
    {"method": "reptile+metavd+dp", "noise": 0.5, "part": 2, "chunk": 2},
    {"method": "reptile+metavd", "rows": "apart"},
    {"method": "maml", "lost": 0.3, "valid": 0.2, "patience": 1, "eval_every": 1},
    {"method": "fedavg", "valid": 0.2, "patience": 1, "eval_every": 1, "eval_clients": 2, "final_clients": 2},
)


def rows() -> Any:
    """Four noisy clusters in five dimensions."""
    draw = np.random.default_rng(0)
    y = np.arange(120) % 4
    return metavd.arrays((draw.normal(size=(120, 5)) + 2.0 * np.eye(5)[y]).astype(np.float32), y, name="blobs")


def found(backend: str, names: Sequence[str] = SOME, only: str = "method") -> dict[str, list[str | None]]:
    """Return the hashes of a run of each of these methods and of variants, or only of those that set this."""
    source = rows()
    hashes = {}
    plain = ({"method": name} for name in names)
    for settings in (each for each in (*plain, *VARIANTS) if only in each):
        own = cheap(settings["method"], **CHEAP)
        chosen = {name: value for name, value in settings.items() if name != "rows"}
        owned.MANY = 2 if "rows" in settings else MANY
        result = metavd.run(source=source, backend=backend, **FIELDS | own | chosen)
        hashes[" ".join(map(str, settings.values()))] = [
            result["model_sha256"], result.get("kept_sha256"), repr(result["unseen"]["nll"])]  # fmt: skip
    return hashes


class Dying(Silent):
    """Kills its process in round 3."""

    def round(self, record: Any) -> None:
        if record.round == 3:
            os.kill(os.getpid(), 9)


def leaves() -> None:
    """Let rank 1 die, once, when it has met the others for three rounds; its host alone counts that as a restart."""
    met, rows = count(1), Ranks.rows

    def dying(ranks: Ranks, *given: Any) -> Any:
        if ranks == (1, 2, 1) and next(met) == 3:
            os.kill(os.getpid(), 9)
        return rows(ranks, *given)

    Ranks.rows = dying  # type: ignore[method-assign]


class Cutting(Silent):
    """Takes the link to the other host down in round 3."""

    def round(self, record: Any) -> None:
        if record.round == 3:
            subprocess.run(["ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)


LISTENERS = {"dying": Dying, "cut": Cutting}


def run_in(folder: str, task: str) -> dict[str, Any]:
    """Run fedrep in a folder, or go on with it; a rank may die, or cut its host off, on the way."""
    if task == "leaving":
        leaves()
    own = cheap("fedrep", **CHEAP)
    listener = LISTENERS.get(task, Silent)()
    settings = FIELDS | own | {"method": "fedrep", "rounds": 5, "checkpoint_every": 1, "backend": "loop"}
    settings["rank_wait"] = 30 if task == "cut" else 600
    metavd.run(source=rows(), out=folder, resume=task == "resumed", listener=listener, **settings)
    return metavd.run(source=rows(), out=folder, resume=True, **settings)  # a finished run is read, on every rank


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    run_in(folder, task)
