"""Measure what really crosses the wire: a deployed federation, Flower's own counters beside ours.

    python scripts/federation_traffic.py > table.md

A SuperLink with TLS and node authentication, three SuperNodes, three rounds per line. Ours counts the encoded weights
of every training message; Flower's counts everything that the fleet interface sent and received for the run: hello,
evaluation, records and object trees included. Everything that is started is stopped again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from metavd.flower.follow import runs
from metavd.flower.local import NAME, LocalFederation, federation

ROUNDS, NODES = 3, 3
COMMON = "unseen=0 model=mlp width=512 local_epochs=1"
CASES = (
    ("reptile+metavd", "rate=0.5", False),
    ("reptile+metavd+drop", "rate=0.5 drop_from=0", False),
    ("reptile+metavd+drop", "rate=0.9 drop_from=0", False),
    ("reptile+metavd", "rate=0.5", True),
    ("reptile+metavd+drop", "rate=0.9 drop_from=0", True),
    ("fedavg", "", False),
    ("fedavg+snip", "sparsity=0.7", False),
    ("fedavg+snip", "sparsity=0.7", True),
)


def counters(local: LocalFederation) -> tuple[int, int]:
    """Return bytes sent and received of the last run, as the SuperLink has counted them."""
    traffic = runs(local.environment, NAME, "--limit", "1")[0]["network-traffic"]
    return int(traffic["outbound-bytes"]), int(traffic["inbound-bytes"])


def measure(local: LocalFederation, index: int, method: str, text: str, *, half: bool) -> dict[str, Any]:
    """Run one line of the table."""
    out = local.folder / f"out-{index}"
    config = {
        "method": method, "set": f"{COMMON} {text}".strip(), "rounds": ROUNDS, "clients": NODES, "data": "digits",
        "half": half, "out": str(out), "join-timeout": 120.0,
    }  # fmt: skip
    local.run(config)
    result = json.loads((out / "result.json").read_text())
    last = json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])
    down, up = (sum(each[side] for each in last["traffic"].values()) / NODES for side in (0, 1))
    sent, received = counters(local)
    ours = (result["bytes"]["down"] + result["bytes_evaluation"], result["bytes"]["up"])
    return {
        "method": method + (" fp16" if half else ""), "options": text, "dropped": result["sparsity"], "down": down,
        "up": up, "dense": last["dense_up"] / NODES, "accuracy": result["test"]["accuracy"],
        "ours": ours, "flower": (sent, received),
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="One line of the table.")
    given = parser.parse_args()
    print("| method | options | dropped in the layer | in the model | down kB | up kB | of dense | ours MB, down / up "
          "| Flower's MB, sent / received | more |")  # fmt: skip
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    with federation(Path(tempfile.mkdtemp(prefix="metavd-traffic-"))) as local:
        local.link()
        names = [f"client-{i}" for i in range(NODES)]
        local.register(names)
        for i, name in enumerate(names):
            local.node(name, {"partition-id": i, "name": name})
        for index, (method, text, half) in enumerate(CASES):
            if given.only is not None and index != given.only:
                continue
            line = measure(local, index, method, text, half=half)
            ours, flower = line["ours"], line["flower"]
            cells = [
                f"`{line['method']}`", line["options"],
                f"{line['dropped']['layer']:.1%}", f"{line['dropped']['model']:.1%}",
                f"{line['down'] / 1e3:.1f}", f"{line['up'] / 1e3:.1f}", f"{line['up'] / line['dense']:.1%}",
                f"{ours[0] / 1e6:.3f} / {ours[1] / 1e6:.3f}", f"{flower[0] / 1e6:.3f} / {flower[1] / 1e6:.3f}",
                f"{sum(flower) / sum(ours) - 1:.1%}",
            ]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
