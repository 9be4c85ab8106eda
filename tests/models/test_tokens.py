"""Laws of the networks for token ids: like torch's own cell, deaf to padding, alike under loop and vmap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from derivatives import check_vmap_is_a_loop
from torch import nn

from metavd import run
from metavd.core.model import from_module, xavier
from metavd.data.source import arrays
from metavd.errors import SpecError
from metavd.models import module_for
from metavd.models.tokens import Lstm

NAMES = ("lstm", "transformer")


def ids(rows: int = 6, length: int = 5, tokens: int = 9) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(0).randint(1, tokens, (rows, length)))


def test_lstm_is_torchs_lstm() -> None:
    """Parity: with the same weights, gates sorted as torch sorts them, the last state is that of `nn.LSTM`."""
    ours = Lstm(9, 4).double()
    theirs = nn.LSTM(4, 4, batch_first=True).double()
    order = torch.cat([torch.arange(0, 8), torch.arange(12, 16), torch.arange(8, 12)])  # i f o g -> i f g o
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.inputs.weight[order])
        theirs.weight_hh_l0.copy_(ours.hidden.weight[order])
        theirs.bias_ih_l0.copy_((ours.inputs.bias + torch.arange(16).div(4, rounding_mode="floor").eq(1))[order])
        theirs.bias_hh_l0.zero_()
        expected = theirs(ours.embed(ids()))[0][:, -1]
        torch.testing.assert_close(ours(ids()), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_padding_before_a_text_changes_nothing(name: str) -> None:
    """Law: an LSTM skips padding; a transformer does not look at it (its places differ, so only the ignored ones)."""
    module = module_for(name, (5,), 3, 8, 9).double()
    x = ids()
    if name == "lstm":
        padded = torch.cat([torch.zeros(6, 2, dtype=torch.int64), x], 1)
        torch.testing.assert_close(module(padded), module(x), rtol=0, atol=1e-12)
        return
    x[:, :2] = 0
    before = module(x)
    with torch.no_grad():
        module.encode.embed.weight[0] += 5.0
    torch.testing.assert_close(module(x), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_clients_is_a_loop(name: str) -> None:
    """Parity: first and second derivatives, each client with weights and rows of its own."""
    model = from_module(module_for(name, (5,), 3, 8, 9).double(), init=xavier)
    rows = torch.stack([ids(4).roll(seed, 0) for seed in range(3)])
    check_vmap_is_a_loop(model, rows, torch.tensor([0, 1, 2, 0]), atol=1e-12)


@pytest.mark.parametrize("method", ["reptile+metavd", "pfedgp"])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_runs_on_token_ids(method: str, backend: str) -> None:
    """A class that one token tells is learnt; loop and vmap agree."""
    draw = np.random.RandomState(0)
    x = draw.randint(1, 6, (240, 4))
    source = arrays(x, (x == 3).any(1).astype(int), client=np.arange(240) % 4)
    result = run(method=method, source=source, rounds=2, width=8, backend=backend, seed=1)
    assert result["test"]["accuracy"] > 0.4


def test_networks_of_numbers_refuse_token_ids_and_the_reverse() -> None:
    with pytest.raises(
        SpecError, match=r"model is 'mlp', but it needs numbers .* 9 token ids.*use lstm or transformer"
    ):
        module_for("mlp", (5,), 3, 0, 9)
    with pytest.raises(SpecError, match=r"model is 'lstm', but it needs rows of token ids .*use mlp"):
        module_for("lstm", (5,), 3, 0)


def test_a_strangers_embedding_gets_integers() -> None:
    """A module of the user's own with an embedding learns a class that the first of four token ids decides."""
    module = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    x = np.random.RandomState(0).randint(0, 6, (120, 4))
    source = arrays(x, (x[:, 0] > 2).astype(int), client=np.arange(120) % 4)
    result = run(method="fedavg", source=source, module=module, rounds=30, lr=0.1)
    assert result["test"]["accuracy"] > 0.8
