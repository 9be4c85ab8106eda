"""Print what a deployment consists of as CycloneDX JSON: metavd with an extra and all that it needs, as installed.

python scripts/sbom.py [EXTRA]          # default: flower
"""

from __future__ import annotations

import json
import sys
import uuid
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needs(found: Distribution, extras: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return the names, with their extras, that a package needs on this machine."""
    wanted: dict[str, frozenset[str]] = {}
    for text in found.requires or ():
        each = Requirement(text)
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            name = canonicalize_name(each.name)
            wanted[name] = wanted.get(name, frozenset()) | each.extras
    return wanted


def closure(extra: str) -> dict[str, tuple[Distribution, dict[str, frozenset[str]]]]:
    """Return every package that metavd with an extra needs, with what that needs itself."""
    seen: dict[str, tuple[Distribution, dict[str, frozenset[str]]]] = {}
    todo, asked = [("metavd", frozenset({extra}))], {}
    while todo:
        name, extras = todo.pop()
        extras |= asked.get(name, frozenset())
        if name in seen and extras == asked[name]:
            continue
        asked[name] = extras
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # another platform's, or a variant that this build of torch does not need
        seen[name] = (found, needs(found, extras))
        todo += seen[name][1].items()
    return seen


def licence(found: Distribution) -> list[dict[str, Any]]:
    """Return what a package says of its licence, as far as it is a short word."""
    text = found.metadata.get("License-Expression") or ""
    if text:
        return [{"expression": text}]
    kinds = [each for each in found.metadata.get_all("Classifier") or () if each.startswith("License ::")]
    return [{"license": {"name": each.rpartition(" :: ")[2]}} for each in kinds]


def bill(extra: str) -> dict[str, Any]:
    """Return the bill of materials; equal environments give equal bills."""
    found = closure(extra)
    reference = {name: f"pkg:pypi/{name}@{each.version}" for name, (each, _) in found.items()}
    parts = [
        {
            "type": "application" if name == "metavd" else "library", "bom-ref": reference[name], "name": name,
            "version": each.version, "purl": reference[name], "licenses": licence(each),
        }
        for name, (each, _) in sorted(found.items())
    ]  # fmt: skip
    own = next(part for part in parts if part["name"] == "metavd")
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6",
        "version": 1,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ' '.join(sorted(reference.values())))}",
        "metadata": {"component": own},
        "components": [part for part in parts if part is not own],
        "dependencies": [
            {"ref": reference[name], "dependsOn": sorted(reference[need] for need in wanted if need in reference)}
            for name, (_, wanted) in sorted(found.items())
        ],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(bill(sys.argv[1] if len(sys.argv) > 1 else "flower"), indent=1))
