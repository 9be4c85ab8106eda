"""What comes with a deployment: locked packages, a bill of materials, units for systemd."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-flower.txt"


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", path.read_text(), re.MULTILINE))


def test_every_locked_package_has_hashes_and_the_version_that_is_tested():
    """And nothing in the file says where it was fetched from."""
    known = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins(ROOT / "constraints.txt").items()}
    locked = pins(LOCK)
    assert {"flwr", "torch", "cryptography", "httpx", "numpy", "click"} <= locked.keys()
    assert {name: version for name, version in locked.items() if known.get(name, version) != version} == {
        name: locked[name] for name in ("triton",) if name in locked
    }
    blocks = re.split(r"\n(?=[A-Za-z])", LOCK.read_text())[1:]
    assert len(blocks) == len(locked)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
    assert not re.search(r"://|--index|--find-links", LOCK.read_text())


def test_the_bill_of_materials_names_what_a_deployment_needs():
    """Every package of the bill is locked, every reference is a package of the bill, nothing is there twice."""
    pytest.importorskip("flwr")
    bill = json.loads(json.dumps(runpy.run_path(str(ROOT / "scripts" / "sbom.py"))["bill"]("flower")))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = {each["name"]: each for each in [bill["metadata"]["component"], *bill["components"]]}
    assert len(parts) == 1 + len(bill["components"])
    locked = pins(LOCK)
    assert {name for name in parts if name != "metavd"} <= locked.keys()
    references = {each["bom-ref"] for each in parts.values()}
    assert {each["ref"] for each in bill["dependencies"]} == references
    assert all(set(each["dependsOn"]) <= references for each in bill["dependencies"])
    own = next(each for each in bill["dependencies"] if each["ref"] == parts["metavd"]["bom-ref"])
    assert any("/flwr@" in each for each in own["dependsOn"])
    assert not any("/pytest@" in each for each in references)


def units() -> dict[str, str]:
    """The units of docs/deploy.md, by name."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    found = re.findall(r"`/etc/systemd/system/(\S+\.service)`:\n\n((?:(?:    .*)?\n)+)", text)
    return {name: "\n".join(line[4:] for line in body.splitlines()) for name, body in found}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["metavd-link.service", "metavd-node.service"])
def test_systemd_takes_the_units(tmp_path, name):
    """As they stand in the documentation, but for the program, which need not be installed."""
    text = units()[name].replace("/opt/metavd/bin/metavd", "/bin/true")
    (tmp_path / name).write_text(text.partition("\nsystemctl")[0])
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, check=False
    )
    mine = [line for line in found.stderr.splitlines() if name in line]
    assert (mine, "ExecStart=" in text, "User=metavd" in text) == ([], True, True)


def test_systemd_would_say_what_is_wrong(tmp_path):
    """The test above can fail."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    (tmp_path / "a.service").write_text("[Service]\nExecStart=/bin/true\nNoNewPriviliges=yes\n")
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "a.service")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "a.service" in found.stderr
