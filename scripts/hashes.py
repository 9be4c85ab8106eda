#!/usr/bin/env python3
"""Write the model hashes of short runs, or compare them with a file written before: a refactoring changes no bit.

    scripts/hashes.py write FILE [--device cpu] [--only PART]
    scripts/hashes.py compare FILE [--device cpu] [--only PART]

On a CPU: every method on `digits` under loop, threads and vmap, one run that is stopped and resumed for three methods,
and three methods through Flower in one process. With `--device cuda`: four methods with `precision=exact`. Hashes
depend on the processor and on the version of torch, so both sides belong on one machine. Exit status 1 if any differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROUNDS = 5
SOME = ("fedavg", "reptile+metavd", "maml")
ON_GPU = ("fedavg", "reptile+metavd", "maml", "perfedavg+metavd")


def simulated(backends: tuple[str, ...], names: tuple[str, ...], **settings: object) -> Iterator[tuple[str, str]]:
    """Run methods under backends."""
    import metavd  # noqa: PLC0415

    for method in names:
        for backend in backends:
            result = metavd.run(method=method, data="digits", rounds=ROUNDS, seed=0, backend=backend, **settings)
            yield f"{method}/{backend}", result["model_sha256"]


def resumed() -> Iterator[tuple[str, str]]:
    """Stop runs with SIGINT-like extension: three rounds, then the rest from the checkpoint."""
    code = (
        "import metavd, sys\n"
        "from metavd.engine.rounds import Silent\n"
        "class Stop(Silent):\n"
        "    def round(self, r):\n"
        "        if r.round == 3: raise KeyboardInterrupt\n"
        "try: metavd.run(method=sys.argv[1], rounds=5, checkpoint_every=1, out=sys.argv[2], listener=Stop())\n"
        "except BaseException as e: assert 'Interrupt' in type(e).__name__, e\n"
        "done = metavd.run(method=sys.argv[1], rounds=5, checkpoint_every=1, out=sys.argv[2], resume=True)\n"
        "print(done['model_sha256'])\n"
    )
    for method in SOME:
        with tempfile.TemporaryDirectory() as folder:
            out = subprocess.run(
                [sys.executable, "-c", code, method, f"{folder}/run"], check=True, text=True, capture_output=True
            )
            yield f"{method}/resumed", out.stdout.strip()


def federated() -> Iterator[tuple[str, str]]:
    """Run a real federation of three nodes on this machine, without TLS."""
    for method in SOME:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "metavd", "federate", "demo", "--nodes", "3", "--rounds", "3", "--method", method,
                "--insecure", "--out", f"{folder}/run",
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=600)
            yield f"{method}/flower", json.loads(Path(folder, "run", "result.json").read_text())["model_sha256"]


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", help="a part of the keys, such as /vmap or metavd")
    given = parser.parse_args()
    from metavd import methods  # noqa: PLC0415

    there = json.loads(given.file.read_text()) if given.file.exists() else {}
    found: dict[str, str] = {}
    if given.device == "cuda":
        parts = [simulated(("vmap",), ON_GPU, device="cuda", precision="exact")]
    else:
        parts = []
        only = given.only or ""
        backends = tuple(each for each in ("loop", "threads", "vmap") if only in f"/{each}" or not only.startswith("/"))
        names = tuple(name for name in methods.NAMES if only.startswith("/") or only in name)
        if backends:
            parts.append(simulated(backends, names, device="cpu"))
        if only in "/resumed":
            parts.append(resumed())
        if only in "/flower":
            parts.append(federated())
    different = 0
    for key, value in itertools.chain(*parts):
        name = f"{given.device}:{key}"
        found[name] = value
        if given.what == "write":
            given.file.write_text(json.dumps(there | found, indent=0, sort_keys=True) + "\n")
        elif there.get(name) != value:
            different += 1
            print(f"{name}: {value[:12]}, was {there.get(name, 'not there')[:12]}", flush=True)
    print(f"{len(found)} hashes" + (f", {different} differ" if given.what == "compare" else f" in {given.file}"))
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
