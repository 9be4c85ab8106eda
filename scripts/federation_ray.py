"""Run many simulated nodes on Flower's Ray engine, with the same app as a deployment, and say how long it took.

    python scripts/federation_ray.py --nodes 100 --rounds 10

Needs metavd[simulation]. Everything that is started is stopped again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from metavd.flower.local import federation, node_config

PATIENCE = 3600


def main() -> None:
    """Start, wait, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--method", default="reptile+metavd")
    parser.add_argument("--cohort", type=float, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="metavd-ray-"))
    config = {
        "method": given.method, "set": "unseen=0 partition=iid test_rows=uniform", "rounds": given.rounds,
        "clients": given.nodes, "cohort": given.cohort, "data": "digits", "out": str(folder / "run"),
        "join-timeout": 600.0, "round-timeout": 1800.0,
    }  # fmt: skip
    with federation(folder) as local:
        (folder / "flwr").mkdir()
        (folder / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "ray"\n\n[superlink.ray]\naddress = ":local:"\n'
        )
        command = [str(Path(sys.executable).parent / "flwr"), "run", str(local.app()), "ray", "--stream"]
        command += ["--federation-config", f"num-supernodes={given.nodes} client-resources-num-cpus=1"]
        began = time.monotonic()
        local.start("run", [*command, "--run-config", node_config(config)]).wait(PATIENCE)
        took = time.monotonic() - began
        if not (folder / "run" / "result.json").exists():
            sys.exit(local.log("run")[-3000:])
    rounds = [json.loads(line) for line in (folder / "run" / "rounds.jsonl").read_text().splitlines()]
    answers = [len(each["cohort"]) for each in rounds]
    seconds = [each["seconds"] for each in rounds]
    result = json.loads((folder / "run" / "result.json").read_text())
    print(
        f"{given.nodes} nodes, {len(rounds)} rounds of {given.method}, answers a round {min(answers)} to {max(answers)}"
    )
    later = sum(seconds[1:]) / max(len(seconds) - 1, 1)
    print(f"whole command {took:.0f} s; first round {seconds[0]:.1f} s, others {later:.1f} s")
    print(f"accuracy {result['test']['accuracy']:.1%} over {result['test']['clients']} clients; {folder / 'run'}")


if __name__ == "__main__":
    main()
