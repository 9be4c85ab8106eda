"""Where a result comes from: version, commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..version import VERSION


@cache
def commit() -> str | None:
    """Return the commit of the checkout that the package runs from, with + for changes not committed.

    Where the package was taken out of its checkout, a file commit.txt beside it may say where from; else None.
    """
    here = Path(__file__).resolve().parent.parent
    try:
        answers = [
            subprocess.run(["git", "-C", str(here), *command], capture_output=True, text=True, timeout=10, check=True)
            for command in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "."],
                ["rev-parse", "--show-toplevel"],
            )
        ]
    except (OSError, subprocess.SubprocessError):
        note = here / "commit.txt"
        return note.read_text().strip() if note.exists() else None
    if Path(answers[2].stdout.strip()).resolve() / "src" / "metavd" != here:
        return None  # installed inside somebody else's checkout
    return answers[0].stdout.strip() + ("+" if answers[1].stdout.strip() else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def provenance(device: str) -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a figure."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor()
    return {
        "version": VERSION,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{name}, {os.cpu_count()} cores",
    }
