"""Small files of every canonical format, made in the same way as the fuzzer makes them."""

from __future__ import annotations

import format_samples
import numpy as np
import pytest


@pytest.fixture(scope="session")
def make():
    """The module that makes small datasets."""
    return format_samples


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
