"""The package from Python: light to import, typed, and usable on one's own arrays and network in ten lines."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import metavd

PUBLIC = {
    "Algorithm", "Experiment", "Federation", "Personal", "Source", "__version__", "arrays", "compare", "federate",
    "from_module", "metrics", "partition", "personalize", "run", "table",
}  # fmt: skip


def test_ten_lines_on_own_arrays_and_module() -> None:
    """The issue's example: own rows, own network, one call, a result to read."""
    from torch import nn

    x = np.random.default_rng(0).normal(size=(400, 2))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    source = metavd.arrays(x, y, name="quadrants")
    network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    result = metavd.run(
        source=source, module=network, method="reptile+metavd", rounds=5, clients=6, unseen=2, partition="iid"
    )
    assert (result["data"], result["method"]) == ("quadrants", "reptile+metavd")
    assert result["test"]["clients"] == 6
    assert result["unseen"]["clients"] == 2
    assert 0 <= result["unseen"]["accuracy"] <= 1


def test_learns_something() -> None:
    """A linear problem that FedAvg solves: the API trains, it does not only run."""
    from torch import nn

    x = np.random.default_rng(1).normal(size=(600, 3))
    source = metavd.arrays(x, (x.sum(1) > 0).astype(int))
    settings = {"source": source, "method": "fedavg", "partition": "iid", "lr": 0.1, "clients": 5, "unseen": 1}
    result = metavd.run(module=nn.Linear(3, 2), rounds=20, **settings)
    assert result["test"]["accuracy"] > 0.9


def test_model_with_chosen_layers() -> None:
    """`from_module(module, variational=[...])` decides which layers carry a posterior."""
    from torch import nn

    from metavd.runs.setup import prepare

    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    model = metavd.from_module(network, variational=["0", "2"])
    x = np.random.default_rng(1).normal(size=(100, 3))
    source = metavd.arrays(x, (x.sum(1) > 0).astype(int))
    setup = prepare(metavd.Experiment(method="fedavg+vd", clients=3, unseen=1, cohort=2), source, model)
    assert setup.algorithm.posterior is not None
    assert setup.algorithm.posterior.layers == ("0", "2")


def test_pieces_fit_together() -> None:
    """Partitions and metrics can be used by themselves."""
    x = np.random.default_rng(0).normal(size=(100, 2))
    source = metavd.arrays(x, np.arange(100) % 2)
    federation = metavd.federate(source, "dirichlet:0.5", clients=4, unseen=1, seed=0)
    assert isinstance(federation, metavd.Federation)
    assert isinstance(source, metavd.Source)
    assert sum(len(rows) for rows in (*federation.train, *federation.test)) == 100
    assert metavd.partition.parse("iid")
    probs = np.array([[0.8, 0.2], [0.4, 0.6]])
    assert metavd.metrics.accuracy(probs, np.array([0, 1])) == 1.0
    assert metavd.metrics.ece_top1(probs, np.array([0, 1])) == pytest.approx(0.3)


def test_public_names() -> None:
    """All that the issue promises is there, listed and documented; nothing else is."""
    assert set(dir(metavd)) == set(metavd.__all__) == PUBLIC
    for name in PUBLIC - {"__version__"}:
        assert inspect.getdoc(getattr(metavd, name)), name
    with pytest.raises(AttributeError, match="'runn'"):
        metavd.runn  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """The package is marked as typed, and every name imported on use is also declared for type checkers."""
    assert resources.files("metavd").joinpath("py.typed").is_file()
    text = Path(inspect.getsourcefile(metavd) or "").read_text()
    guarded = [node for node in ast.parse(text).body if isinstance(node, ast.If)]
    declared = {
        alias.asname for node in ast.walk(guarded[0]) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == PUBLIC - {"__version__"}


def test_public_functions_are_annotated() -> None:
    for name in ("run", "compare", "from_module", "arrays", "federate"):
        signature = inspect.signature(getattr(metavd, name))
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, (name, parameter)


def test_import_is_light() -> None:
    """`import metavd`, its version and its list of names load neither torch nor anything else that is heavy."""
    code = (
        "import sys, metavd; metavd.__version__; dir(metavd)\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'rich', 'click', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_star_import_gives_the_public_names() -> None:
    space: dict[str, object] = {}
    exec("from metavd import *", space)
    assert set(space) >= PUBLIC


def test_version_is_the_package_s() -> None:
    from metavd.version import VERSION

    assert metavd.__version__ == VERSION
