"""A short run of scripts/fuzz_data.py; the long one is `python scripts/fuzz_data.py`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "fuzz_data.py"


def test_sixty_spoilt_datasets_and_all_hostile_ones():
    """60 seeded mutations and every bomb, hostile pickle and odd dataset: refused in a sentence, or loaded right."""
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--cases", "60"], capture_output=True, text=True, timeout=600, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 failed" in found.stdout


def test_a_wrong_reader_is_found_out(make, rng, tmp_path):
    """The judge can fail: content that differs, and a refusal that should not be."""
    spec = importlib.util.spec_from_file_location("fuzz_data", SCRIPT)
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    made = make.npz(tmp_path, rng)
    rows = made.oracle()
    other = rows._replace(y=1 - rows.y)
    with pytest.raises(fuzz.Failed, match="y is not what the files hold"):
        fuzz.judge(made.name, made.root, made.options, lambda: other, None)
    made.files[0].write_bytes(b"spoilt")
    with pytest.raises(fuzz.Failed, match="refused a good file"):
        fuzz.judge(made.name, made.root, made.options, made.oracle, True)
    result, fault = fuzz.guarded(lambda: 1 / 0)
    assert result is None
    assert "ZeroDivisionError" in fault
