#!/usr/bin/env bash
# Install a built wheel as a user would, and run it where the checkout cannot be imported.
#
#     scripts/check_wheel.sh dist/metavd-0.1.0-py3-none-any.whl
#
# The environment is new and sees no other one, so a dependency or a data file that the wheel forgot fails here.
set -euo pipefail

wheel=$(realpath "${1:?usage: scripts/check_wheel.sh WHEEL}")
constraints=$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../constraints.txt
python=${PYTHON:-python3}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
# Cleared: relative to another folder, or able to let the new environment see packages from elsewhere.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PYTHONPATH PYTHONHOME
# Compiling all of torch takes as long as installing it; what is imported is compiled then, once.
unset PYTHONDONTWRITEBYTECODE
"$scratch/venv/bin/python" -m pip install -qq --no-compile -c "$constraints" "$wheel"

cd "$scratch"
export PATH="$scratch/venv/bin:$PATH" PYTHONSAFEPATH=1
python - "$scratch/venv" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import metavd.version

home = Path(metavd.version.__file__).resolve().parent
assert home.is_relative_to(Path(sys.argv[1]).resolve()), f"metavd was imported from {home}, not from the wheel"
assert (home / "py.typed").is_file(), "the wheel has no py.typed"
assert version("metavd") == metavd.version.VERSION, "the wheel's version is not metavd.version.VERSION"
print(f"metavd {version('metavd')}: imported from the wheel")
PYTHON

set -x
metavd --help
metavd methods
metavd run fedavg --rounds 2 --out "$scratch/run"
metavd report "$scratch/run"
metavd paper list
