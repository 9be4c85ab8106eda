"""What leaves the package: a table of answers, and a client's model as safetensors or ONNX with its model card.

The packages onnx, onnxruntime and onnxscript (ONNX) and pyarrow (Parquet) are optional, and imported only here.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..container import Format, dump, write_atomic
from ..core import rng
from ..core.gp_slots import POINTS
from ..core.posterior import per_weight
from ..data.partition import some
from ..errors import UserError
from ..evaluate.figures import get
from ..extras import need
from ..templates import filled
from ..tree import Params
from .model import Personal, Prediction
from .samples import Samples, described, domain_number

FORMATS = ("safetensors", "onnx")
TABLES = ("csv", "parquet")
AGREES = 1e-5
"""Largest difference of a probability that an exported graph may show."""
_FIGURES = ("accuracy", "worst_client", "nll", "brier", "ece_top1", "mce_top1")
"""What a model card shows."""
LICENCE = "not chosen yet; whoever publishes this model fills this in"


def check_path(path: Path, kinds: Sequence[str], kind: str | None = None) -> str:
    """Return which kind of file is to be written, before anything is computed for it."""
    ending = path.suffix.removeprefix(".").lower()
    if kind is not None and kind not in kinds:
        raise UserError(f"format is {kind!r}, but must be {' or '.join(kinds)}")
    if ending != kind if kind is not None else ending not in kinds:
        right = " or ".join(f".{each}" for each in ([kind] if kind is not None else kinds))
        raise UserError(f"the file {path} ends in {path.suffix or 'nothing'!r}, but must end in {right}")
    if not path.parent.is_dir():
        raise UserError(f"the file {path} lies in a folder that does not exist; create {path.parent} first")
    return ending


# A table of answers


def table(
    own: Personal, rows: Samples, said: Prediction, top: int | None = None, inside: np.ndarray | None = None
) -> dict[str, list[Any]]:
    """Return the answers by column, one line per row; `top` gives the most probable classes in place of all.

    row, file (of a folder), client and label (where they are known), predicted, confidence, entropy,
    mutual_information (where there is a posterior), set and set_size (where `inside` (B, K) says which classes are in),
    then p_CLASS for every class, or top_1, p_1, top_2, p_2, ...
    """
    names = own.classes
    if top is not None and not 1 <= top <= len(names):
        raise UserError(f"top is {top}, but must lie between 1 and the {len(names)} classes")
    order = np.argsort(-said.probs, axis=1, kind="stable")
    columns: dict[str, list[Any]] = {"row": list(range(len(said.probs)))}
    if rows.files is not None:
        columns["file"] = rows.files
    if rows.client is not None:
        columns["client"] = rows.client
    if rows.y is not None:
        columns["label"] = [names[label] for label in rows.y]
    columns["predicted"] = [names[label] for label in order[:, 0]]
    columns["confidence"] = said.probs.max(1).tolist()
    columns["entropy"] = said.entropy.tolist()
    if said.mutual_information is not None:
        columns["mutual_information"] = said.mutual_information.tolist()
    if inside is not None:
        columns["set"] = [
            ";".join(names[label] for label in ranked if held[label])
            for ranked, held in zip(order, inside, strict=True)
        ]
        columns["set_size"] = inside.sum(1).tolist()
    if top is None:
        return columns | {f"p_{name}": said.probs[:, number].tolist() for number, name in enumerate(names)}
    for place in range(top):
        columns[f"top_{place + 1}"] = [names[label] for label in order[:, place]]
        columns[f"p_{place + 1}"] = np.take_along_axis(said.probs, order[:, place, None], 1)[:, 0].tolist()
    return columns


def csv_text(columns: Mapping[str, Sequence[Any]]) -> str:
    """Write columns as CSV; numbers have 7 digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow(f"{value:.7g}" if isinstance(value, float) else value for value in row)
    return text.getvalue()


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns as the file's ending says, CSV or Parquet, whole or not at all."""
    if check_path(path, TABLES) == "csv":
        write_atomic(path, csv_text(columns).encode())
        return
    arrow, parquet = (need(name, "parquet", "a .parquet file") for name in ("pyarrow", "pyarrow.parquet"))
    data = io.BytesIO()
    parquet.write_table(arrow.table(dict(columns)), data)
    write_atomic(path, data.getvalue())


# A client's model for others


def export(
    own: Personal,
    path: str | Path,
    *,
    format: str | None = None,
    domain: str | None = None,
    samples: int | None = None,
    licence: str = LICENCE,
) -> Path:
    """Write a client's model and, beside it with .md after its name, its model card; return the card's path.

    Args:
        own: the model.
        path: the file, ending in .safetensors or .onnx.
        format: which of the two; by default as the file's ending says.
        domain: of a model of several datasets, whose normalisation an ONNX graph has.
        samples: posterior draws in an ONNX graph; by default the run's.
        licence: what the card says of it.
    """
    path = Path(path)
    kind = check_path(path, FORMATS, format)
    if kind == "onnx":
        data = onnx_bytes(own, domain=domain, samples=samples)
    else:
        data = dump(Format("export", 1), plain_weights(own), {"metavd": json.dumps(_short(own))})
    page = path.with_name(f"{path.name}.md")
    text = card(own, path.name, kind, domain=domain, licence=licence)
    write_atomic(path, data)
    write_atomic(page, text.encode())
    return page


def _short(own: Personal) -> dict[str, Any]:
    """What may travel with a model: nothing that names a person or a folder of this machine."""
    public = ("metavd", "method", "data", "spec", "model_sha256", "round", "kind", "samples", "classes", "domain")
    prepare = described(own.takes)["prepare"]
    return {key: own.about[key] for key in public} | ({"prepare": prepare} if prepare else {})


def plain_weights(own: Personal) -> Params:
    """Return weights that any network of the same shape loads: dropped ones are 0, spreads are variances.

    What the method keeps beside them (pFedGP's tree) goes along under its own names.
    """
    noise = own.algorithm().posterior
    result = {name: value for name, value in own.params.items() if not name.endswith(".mask")}
    for layer in [] if noise is None else noise.layers:
        assert noise is not None
        for name in noise.entries(layer, own.model.layers[layer]):
            result.pop(name, None)
        result[f"{layer}.variance"] = noise.variance(own.params, layer)
    for layer in own.model.layers:
        mask = own.params.get(f"{layer}.mask")
        for name in (f"{layer}.weight", f"{layer}.variance"):
            if mask is not None and name in result:
                result[name] = result[name] * per_weight(mask, result[name])
    return {name: value.detach().cpu().contiguous().clone() for name, value in result.items()}


class _Graph(nn.Module):
    """A client's model as a module of one argument: stored rows as floats -> what `Personal.predict` says of them."""

    def __init__(self, own: Personal, domain: int | None, samples: int | None) -> None:
        super().__init__()
        self.own, self.domain, self.predict = own, domain, own.answer(samples)
        self.names = {name: name.replace(".", "/") for name in own.params}
        for name, buffer in self.names.items():
            self.register_buffer(buffer, own.params[name].detach().cpu().contiguous())
        self.register_buffer("key", rng.fold(torch.tensor(own.about["key"], dtype=torch.int64), 0))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return probabilities and, where there is a posterior, the information, in float32."""
        params = {name: self.get_buffer(buffer) for name, buffer in self.names.items()}
        said = self.predict(params, self.own.normalise(x, self.domain), self.get_buffer("key"))
        return (said.probs.float(), *(value.float() for value in said.drawn.values()))


def _single(own: Personal) -> Personal:
    """Return the model on the CPU and in float32, the only type in which onnxruntime knows every operator."""
    params = {
        name: value.cpu().float() if value.is_floating_point() else value.cpu() for name, value in own.params.items()
    }
    return replace(own, params=params, experiment=replace(own.experiment, dtype="float32"))


def onnx_bytes(own: Personal, *, domain: str | None = None, samples: int | None = None) -> bytes:
    """Return a client's model as an ONNX graph: `x` (rows, ...) float32 as stored -> `probabilities` (rows, K).

    Normalisation, softmax and, where the method has a posterior, its draws and the output `mutual_information` (rows,)
    are in the graph. The draws are those of `Personal.predict` for up to `use.ROWS` rows at a time. It is run by
    onnxruntime and compared before it is returned.
    """
    if POINTS in own.params:
        raise UserError(
            f"{own.experiment.method} answers by Gaussian processes, whose Cholesky factors ONNX cannot express; "
            "use --format safetensors, or metavd predict"
        )
    onnx, runtime, _ = (need(name, "export", "ONNX") for name in ("onnx", "onnxruntime", "onnxscript"))
    number = domain_number(own.takes, domain or own.about["domain"])
    graph = _Graph(_single(own), number, samples).eval()
    top = own.takes.tokens or (255 if own.takes.x.dtype == np.uint8 else 1)
    draw = np.random.default_rng(0).uniform(0, top, (9, *own.takes.x.shape[1:]))
    stored = draw.astype(own.takes.x.dtype)
    said = own.predict(stored, samples=samples, domain=domain)
    wanted = {"probabilities": said.probs, "mutual_information": said.mutual_information}
    names = [name for name, value in wanted.items() if value is not None]
    rows = torch.from_numpy(stored).float()
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                graph, (rows,), dynamo=True, verbose=False, input_names=["x"], output_names=names,
                dynamic_shapes=({0: torch.export.Dim("rows")},),
            )  # fmt: skip
        assert program is not None
        proto = program.model_proto
        onnx.helper.set_model_props(proto, {"metavd": json.dumps(_short(own)), "classes": json.dumps(own.classes)})
        data: bytes = proto.SerializeToString()
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # exporter and runtime raise kinds of their own, for a network that they cannot express
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"this network cannot be written as ONNX ({why}); use --format safetensors") from error
    for count in (len(rows), 1):
        got = dict(zip(names, session.run(None, {"x": rows[:count].numpy()}), strict=True))
        worst = max(float(np.abs(got[name] - wanted[name][:count]).max()) for name in names)  # type: ignore[index]
        if not worst <= AGREES:
            raise UserError(f"onnxruntime answers {worst:.2g} apart from the model, but at most {AGREES:g} is allowed")
    return data


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks about packages that it does not need here from the user."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# The model card


def card(own: Personal, file: str, kind: str, *, domain: str | None = None, licence: str = LICENCE) -> str:
    """Write the Markdown page that goes with an exported model."""
    about, takes = own.about, own.takes
    who = {
        "participating": f"client {about['client']}, who took part in training",
        "unseen": f"client {about['client']}, who never took part in training",
        "new": "a client who never took part in training",
    }[about["kind"]]
    named = domain or about["domain"]
    number = domain_number(takes, named) if named else None
    kinds = {"table": "columns", "text": "texts"}
    return filled(
        "card.md", file=file, kind=kind, about=about, takes=takes, e=own.experiment, licence=licence, who=who,
        shape=takes.x.shape[1:], classes=f"{len(own.classes)}: {some(own.classes, 20)}",
        made_of="" if takes.prepare is None else kinds[takes.prepare.plain()["kind"]],
        figures=[get(name) for name in _FIGURES], gaussian_processes=POINTS in own.params, network=_network(own),
        look=None if takes.domains and number is None else takes if number is None else takes.domains[number],
    )  # fmt: skip


def _network(own: Personal) -> str:
    """Return the code that builds the network; nothing where the run was given one."""
    if own.module is not None:
        return ""
    takes, e = own.takes, own.experiment
    more = f", {takes.tokens}" if takes.tokens else ""
    return f'module_for("{e.model}", {tuple(takes.x.shape[1:])}, {takes.num_classes}, {e.width}{more})'
