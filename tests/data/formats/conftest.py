"""Small files of every canonical format; the fuzzer knows how to make them, so the tests make them in the same way."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "fuzz_data.py"


@pytest.fixture(scope="session")
def make():
    """The module scripts/fuzz_data.py."""
    spec = importlib.util.spec_from_file_location("fuzz_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_data"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def same():
    """Assert that a source holds exactly these rows."""

    def check(data, rows):
        for what in ("x", "y", "client", "test"):
            got, right = getattr(data, what), getattr(rows, what)
            assert (got is None) == (right is None), what
            if got is not None:
                np.testing.assert_array_equal(got, right, err_msg=what)

    return check
