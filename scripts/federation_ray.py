"""Run many simulated nodes on Flower's Ray engine, with the same app as a deployment, and say how long it took.

    python scripts/federation_ray.py --nodes 100 --rounds 10

Needs metavd[simulation]. Everything that is started is stopped again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from metavd.flower.follow import follow
from metavd.flower.local import federation
from metavd.runs.store import Store


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
        began = time.monotonic()
        follow(
            local.app(), config, superlink="ray", environment=local.environment, show=lambda line: print(line, end=""),
            extra=("--federation-config", f"num-supernodes={given.nodes} client-resources-num-cpus=1"),
        )  # fmt: skip
        took = time.monotonic() - began
    rounds = Store(folder / "run").read_rounds()
    answers = [len(each["cohort"]) for each in rounds]
    seconds = [each["seconds"] for each in rounds]
    result = Store(folder / "run").read_result()
    print(f"{given.nodes} nodes, {len(rounds)} rounds of {given.method}, {min(answers)} to {max(answers)} answers")
    later = sum(seconds[1:]) / max(len(seconds) - 1, 1)
    print(f"whole command {took:.0f} s; first round {seconds[0]:.1f} s, others {later:.1f} s")
    print(f"accuracy {result['test']['accuracy']:.1%} over {result['test']['clients']} clients; {folder / 'run'}")


if __name__ == "__main__":
    main()
