"""A posterior of two entries, written without any of ours: log sigma^2 = row + column."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from metavd.core.posterior import POSTERIORS


@dataclass(frozen=True)
class Crossed:
    """One number per row and one per column of a layer's weights."""

    layers: tuple[str, ...]
    everywhere: ClassVar[bool] = False

    @classmethod
    def build(cls, layers, weights, choice):
        return cls(layers)

    def describe(self):
        return {"layers": self.layers}

    def entries(self, layer, weight):
        return {f"{layer}.rows": (weight[0],), f"{layer}.columns": (weight[1],)}

    def start(self, entry):
        return -4.0 if entry.endswith("rows") else 0.0

    def stored(self, entry, value):
        return value / 2

    def bounded(self, entry, stored):
        return stored

    def stuck(self, entry, stored):
        return torch.zeros_like(stored, dtype=torch.bool)

    def variance(self, params, layer):
        return (params[f"{layer}.rows"][:, None] + params[f"{layer}.columns"]).exp()

    def perturb(self, params, layer):
        return {"variance": self.variance(params, layer)}

    def precision(self, params, layer, share):
        return share / self.variance(params, layer)

    def rates(self, params, *, clamped=True):
        found = {layer: self.variance(params, layer) for layer in self.layers}
        return {layer: value / (value + params[f"{layer}.weight"].square()) for layer, value in found.items()}

    def kl(self, params, *, mean=True):
        terms = [params[f"{layer}.{entry}"].mean() for layer in self.layers for entry in ("rows", "columns")]
        return -0.01 * torch.stack(terms).sum()


POSTERIORS.add("crossed", Crossed, __name__)
