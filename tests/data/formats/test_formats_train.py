"""From files to a trained model: every canonical format, small and made on the fly, goes the whole way."""

import numpy as np
import pytest

import metavd
from metavd.data.collection import load

CASES = {
    "cifar10 binary": ("cifar", {"kind": 10, "version": "binary", "n": 20}, "cifar10:subset=yes"),
    "cifar10 python": ("cifar", {"kind": 10, "version": "python", "packed": "tar.gz", "n": 20}, "cifar10:subset=yes"),
    "cifar100 binary": (
        "cifar",
        {"kind": 100, "version": "binary", "packed": "tar.gz", "n": 40},
        "cifar100:subset=yes",
    ),
    "cifar100 python": (
        "cifar",
        {"kind": 100, "version": "python", "n": 40},
        "cifar100:subset=yes,labels=coarse",
    ),
    "femnist": ("femnist", {"users": 5}, "femnist"),
    "celeba original": ("celeba", {"people": 5, "each": 6}, "celeba:size=16"),
    "celeba leaf": ("celeba", {"layout": "leaf", "people": 5, "each": 6}, "celeba:size=16"),
    "mnist by writer": ("idx", {"name": "mnist", "writers": True}, "mnist"),
    "mnist": ("idx", {"name": "mnist"}, "mnist:writers=no"),
    "fashion-mnist": ("idx", {"name": "fashion-mnist", "packed": False}, "fashion-mnist"),
    "emnist": ("idx", {"name": "emnist"}, "emnist"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_format_trains(case, make, rng, tmp_path):
    """A round of reptile+metavd on the files, by the text that the command line takes; the result has every part."""
    how, given, text = CASES[case]
    made = getattr(make, how)(tmp_path, rng, **given)
    extra = ",".join(f"{key}={value}" for key, value in made.options.items() if f"{key}=" not in text)
    data = load(text + (f"{',' if ':' in text else ':'}{extra}" if extra else ""), tmp_path)
    natural = data.defaults["partition"] == "natural"
    assert natural == (data.sources[0].client is not None)
    people = len(np.unique(data.sources[0].client)) if natural else 4
    settings = {"clients": max(people - 1, 1), "unseen": int(people > 1), "cohort": 1, "rounds": 1, "width": 4}
    partition = {} if natural else {"partition": "iid"}
    result = metavd.run(source=data, method="reptile+metavd", model="small-cnn", **settings, **partition)
    assert result["test"]["samples"] > 0
    assert np.isfinite(result["test"]["nll"])
