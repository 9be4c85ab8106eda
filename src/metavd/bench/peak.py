"""The machine's matrix products: `python -m metavd.bench.peak DEVICE` prints operations a second by precision."""

from __future__ import annotations

import json
import sys
import time

import torch

_SECONDS = 1.5
"""Time of a measurement; the best product of it counts."""


def product(size: int, device: str, dtype: torch.dtype) -> float:
    """Return the most operations a second of a square product."""
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    best, until = 0.0, time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def peaks(device: str) -> dict[str, float]:
    """Return the peak of each precision that the device is used in."""
    size = 8192 if device == "cuda" else 2048
    found = {}
    for name in ("float32", "tf32", "bf16") if device == "cuda" else ("float32", "bf16"):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        found[name] = product(size, device, torch.bfloat16 if name == "bf16" else torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


if __name__ == "__main__":
    print(json.dumps(peaks(sys.argv[1])))
