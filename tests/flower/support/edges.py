"""What goes wrong before the first round and after the last."""

from __future__ import annotations

from .answers import INF, NAN, claims, told, without
from .stage import CLIENTS, Fault, all_rounds, never
from .waits import silent

BEGINNING = {
    "message": "query", "absent": all_rounds, "named": False, "quick": True, "client": CLIENTS - 1, "lasting": True,
}  # fmt: skip
END = {"message": "evaluate", "absent": never, "named": False}
OTHERS = [
    *(Fault("bad hello", name, claims("reply", **changed), **BEGINNING) for name, changed in (
        ("its look is no JSON", {"look": "{"}), ("its look is deep", {"look": "[" * 100_000}),
        ("its look lacks all", {"look": "{}"}), ("its look holds NaN", {"look": '{"rows": NaN}'}),
        ("its partition is text", {"partition": "x"}), ("its partition is infinite", {"partition": INF}),
        ("another protocol", {"protocol": 0}), ("no protocol", {"protocol": None}))),
    Fault("bad hello", "an exception", told(2, "hello failed"), **BEGINNING),
    Fault("bad hello", "no answer", silent, **BEGINNING),
    Fault("bad hello", "no reply", without("reply"), **BEGINNING),
    *(Fault("bad figures", name, claims("metrics", **changed), **END) for name, changed in (
        ("NaN", {"accuracy": NAN}), ("above one", {"accuracy": 7.0}), ("a list", {"accuracy": [1.0, 2.0]}),
        ("no size", {"test_size": None}), ("a negative size", {"train_size": -3}),
        ("an endless size", {"train_size": INF}), ("10^12 rows", {"train_size": 10**12}),
        ("bins cut off", {"bin_count": [1]}))),
    Fault("bad figures", "a loss of NaN", claims("metrics", loss=NAN), absent=never, named=False),
    Fault("bad figures", "an endless time", claims("metrics", seconds=INF), absent=never, named=False),
    Fault("bad figures", "a list of losses", claims("metrics", loss=[1.0, 2.0])),
    Fault("bad figures", "an exception", told(2, "evaluate failed"), **END),
    Fault("bad figures", "no answer", silent, **(END | {"quick": True})),
    Fault("bad figures", "no metrics", without("metrics"), **END),
]  # fmt: skip
