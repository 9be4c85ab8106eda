"""Which layers are chosen in networks that strangers wrote: twelve kinds, small, and what is refused in a sentence.

The table of docs/networks.md is this one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from metavd.core import rng
from metavd.core.model import from_module
from metavd.errors import UserError
from metavd.models import REGISTRY, module_for

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(2, channels)


class BasicBlock(nn.Module):
    """As in torchvision: the shortcut is registered last, under the name downsample."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, 1, 1, bias=False), norm(4), nn.ReLU(inplace=True)
        self.layer1, self.layer2 = BasicBlock(4, 4, 1), BasicBlock(4, 8, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1),
            nn.ReLU(True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(24, 9), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(9, 7), nn.ReLU(True), nn.Linear(7, 5)
        )

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class DenseNet(nn.Module):
    """Every layer sees all before it: the way to the head leads past each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(4 + 2 * i, 2, 3, padding=1) for i in range(3))
        self.norm, self.classifier = norm(10), nn.Linear(10, 5)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(functional.relu(x))], 1)
        return self.classifier(functional.relu(self.norm(x)).mean((2, 3)))


class Inverted(nn.Module):
    """MobileNet's block: 1x1, depthwise 3x3, 1x1, and the input beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1), norm(2 * width), nn.ReLU6(inplace=True),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width), norm(2 * width), nn.ReLU6(inplace=True),
            nn.Conv2d(2 * width, width, 1), norm(width),
        )  # fmt: skip

    def forward(self, x):
        return x + self.conv(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), Inverted(4), Inverted(4))
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 5))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class VitBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x):
        inner = self.ln_1(x)
        x = x + self.self_attention(inner, inner, inner, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(6, 5)))
        self.conv_proj = nn.Conv2d(3, 6, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 6))
        self.encoder = nn.Sequential(VitBlock(6), VitBlock(6))
        self.ln = nn.LayerNorm(6)

    def forward(self, x):
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        return self.heads(self.ln(self.encoder(x))[:, 0])


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True)
        self.fc = nn.Linear(6, 5)

    def forward(self, ids):
        return self.fc(self.lstm(self.embed(ids))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.Linear(4, 5)

    def forward(self, ids):
        return self.decoder(self.encoder(self.embed(ids)).mean(1))


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.hidden, self.stem = nn.Linear(7, 5), nn.Linear(6, 7), nn.Linear(4, 6)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(torch.relu(self.stem(x)))))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.body(x))
        return self.left(x) + self.right(x)


class Shared(nn.Module):
    """One layer is called twice, and another one has the weights of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.again = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.twin, self.out = nn.Linear(6, 6), nn.Linear(6, 5)
        self.twin.weight = self.own.weight

    def forward(self, x):
        x = torch.tanh(self.own(torch.tanh(self.first(x))))
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        return self.out(torch.tanh(self.twin(x)))


class Functional(nn.Module):
    """Everything but the layers is a function, and one matrix is not in a layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2, self.fc1 = nn.Linear(6, 5), nn.Linear(24, 6)
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.mix = nn.Parameter(torch.eye(6))

    def forward(self, x):
        x = functional.adaptive_avg_pool2d(functional.relu(self.conv(x)), 2).flatten(1)
        x = functional.linear(functional.layer_norm(functional.relu(self.fc1(x)), (6,)), self.mix)
        return functional.log_softmax(self.fc2(x), -1)


def nested() -> nn.Module:
    body = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 7), nn.ReLU()))
    return nn.Sequential(body, nn.Sequential(nn.Linear(7, 5)))


IMAGE, ROW, IDS = (3, 8, 8), (4,), ()


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    head: str
    before: str


CASES = {
    "ResNet, as torchvision's, GroupNorm": Case(ResNet, IMAGE, "fc", "layer2.conv2"),
    "VGG": Case(Vgg, IMAGE, "classifier.5", "classifier.3"),
    "DenseNet": Case(DenseNet, IMAGE, "classifier", "layers.2"),
    "MobileNet, GroupNorm": Case(MobileNet, IMAGE, "classifier.1", "features.2.conv.6"),
    "ViT": Case(Vit, IMAGE, "heads.head", "encoder.1.mlp.2"),
    "LSTM": Case(Lstm, IDS, "fc", "fc"),
    "transformer": Case(Transformer, IDS, "decoder", "encoder.layers.1.linear2"),
    "head registered first": Case(HeadFirst, ROW, "head", "hidden"),
    "two heads": Case(TwoHeads, ROW, "refused", "refused"),
    "shared weights": Case(Shared, ROW, "out", "first"),
    "functional calls": Case(Functional, IMAGE, "fc2", "fc1"),
    "Sequential in Sequential": Case(nested, ROW, "1.0", "0.1.0"),
}


def rows(shape: tuple[int, ...]) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 9, (2, 7)) if shape == IDS else torch.randn(2, *shape)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.head != "refused"])
@pytest.mark.parametrize("late", [False, True], ids=["with an example", "settled later"])
def test_layers_that_are_chosen(name: str, late: bool) -> None:
    """The table; with the head taken out the model's features are what the module's head is given."""
    case = CASES[name]
    module, x = case.build(), rows(case.shape)
    if late:
        unsettled = from_module(module)
        assert unsettled.settle is not None
        model = unsettled.settle(x)
    else:
        model = from_module(module, example=x)
    assert (model.head, model.variational, model.num_classes) == ((case.head,), (case.before,), 5)
    seen: list[torch.Tensor] = []
    module.get_submodule(case.head).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        params = model.init(rng.key(0))
        torch.testing.assert_close(model.apply(params, x, None)[0], module(x))
        torch.testing.assert_close(model.features(params, x), functional_features(case, seen[0]))


def functional_features(case: Case, given: torch.Tensor) -> torch.Tensor:
    """What comes after the head is still computed once the head is gone."""
    return functional.log_softmax(given, -1) if case.build is Functional else given


def test_two_heads_are_refused() -> None:
    with pytest.raises(UserError, match=r"logits come from 2 layers, 'left' and 'right', but .* one output layer"):
        from_module(TwoHeads(), example=rows(ROW))


def test_the_page_has_this_table() -> None:
    """docs/networks.md shows the chosen layers as they are chosen."""
    wanted = [f"| {name} | {_code(case.head)} | {_code(case.before)} |" for name, case in CASES.items()]
    assert re.findall(r"^\| [^`|]+ \| (?:`[^|]+`|refused) \| (?:`[^|]+`|refused) \|$", PAGE.read_text(), re.M) == wanted


def test_the_page_has_the_networks_by_name() -> None:
    """Every network of ours stands in the first table, with the layers that are found in it."""
    told = {line[0]: line[1:] for line in re.findall(r"^\| `(.+)` \|.*\| `(.+)` \| `(.+)` \|$", PAGE.read_text(), re.M)}
    for name, network in REGISTRY.own().items():
        shape, tokens = ((7,), 9) if network.tokens else ((3, 16, 16), 0)
        module = module_for(name, shape, 3, 4, tokens)
        example = rows(IDS) if tokens else torch.randn(2, *shape)
        model = from_module(module, example=example)
        assert told.pop(name) == (model.head[0], model.variational[0])
    assert not told


def _code(name: str) -> str:
    return name if name == "refused" else f"`{name}`"


def test_a_chosen_layer_stays_chosen() -> None:
    model = from_module(HeadFirst(), ["stem"], example=rows(ROW))
    assert (model.head, model.variational) == (("head",), ("stem",))
    late = from_module(HeadFirst(), ["stem"])
    assert late.settle is not None
    assert late.settle(rows(ROW)).variational == ("stem",)


class Winding(nn.Module):
    """A layer that is called twice, and one that is called after the head for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.aside, self.twice, self.stem = (nn.Linear(*sizes) for sizes in ((4, 5), (4, 4), (4, 4), (4, 4)))

    def forward(self, x):
        x = self.twice(torch.relu(self.stem(torch.relu(self.twice(x)))))
        logits = self.head(x)
        self.aside(x)
        return logits


@pytest.mark.parametrize(("build", "called"), [
    (HeadFirst, ("stem", "hidden", "head")), (Winding, ("stem", "twice", "head")),
    (ResNet, ("conv1", "layer1.conv1", "layer1.conv2", "layer2.conv1", "layer2.conv2", "layer2.downsample.0", "fc")),
])  # fmt: skip
def test_layers_in_the_order_of_their_calls(build: Callable[[], nn.Module], called: tuple[str, ...]) -> None:
    """Each where it is called last, up to the head; until rows are known, in the order of registration."""
    late = from_module(build())
    assert late.called == tuple(late.layers)
    assert late.settle is not None
    assert late.settle(rows(IMAGE if build is ResNet else ROW)).called == called


def test_frozen_layers_and_no_grad_are_no_obstacle() -> None:
    module = HeadFirst().requires_grad_(False)
    with torch.no_grad():
        assert from_module(module, example=rows(ROW)).head == ("head",)
    assert not any(value.requires_grad for value in module.parameters())


def test_noise_reaches_a_transformer_in_evaluation_mode() -> None:
    """A transformer of torch skips its layers in evaluation mode; a layer that is skipped would ignore its noise."""
    x, layer = rows(IDS), "encoder.layers.1.linear2"
    model = from_module(Transformer().eval(), example=x)
    assert model.variational == (layer,)
    extras = {f"{layer}.variance": torch.full((4, 8), 0.5), f"{layer}.key": rng.split(rng.key(0), 1)}
    with torch.no_grad():
        params = model.init(rng.key(0))
        assert not torch.allclose(model.run(params, x, extras, 1), model.run(params, x, {}, 1))


class Returns(nn.Module):
    """A module whose output a test decides."""

    def __init__(self, what: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.body, self.fc, self.what = nn.Linear(4, 6), nn.Linear(6, 5), what

    def forward(self, x):
        return self.what(self.fc(torch.relu(self.body(x))))


class Recurrent(nn.Module):
    """The output layer reads its own answer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.fc(x)))


REFUSED = [
    (HeadFirst, r"module is the class HeadFirst, but must be an instance of it: HeadFirst\(\.\.\.\)"),
    (torch.relu, r"module is a builtin_function_or_method, but must be an nn\.Module"),
    (Returns(lambda y: (y, y)), r"returns a tuple of 2, but must return the logits alone"),
    (Returns(lambda y: {"logits": y}), r"returns a dict, but must return the logits alone"),
    (Returns(lambda y: y[:, :, None]), r"returns shape \(2, 5, 1\) for 2 rows of shape \(4,\)"),
    (Returns(lambda y: y @ torch.ones(5, 3)), r"3 logits are not the output of .* 'fc' with 5 units"),
    (Returns(lambda y: y.detach()), r"5 logits are not the output of .*none is called"),
    (Returns(lambda y: functional.dropout(y, 0.5)), r"draws random numbers in its forward pass"),
    (nn.Linear(3, 5), r"cannot take rows of shape \(4,\): .*3"),
    (Recurrent(), r"output layer 'fc' is called 2 times"),
    (nn.Sequential(nn.MultiheadAttention(4, 2, 0.1), nn.Linear(4, 5)),
     r"'0' \(MultiheadAttention\) has dropout=0\.1 inside .* build it with dropout=0 and use a method with \+dropout"),
    (nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.2), nn.Linear(4, 5)), r"'0' \(LSTM\) has dropout=0\.2 inside"),
    (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 5)), r"'1' \(Dropout\) draws random numbers"),
    (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)), r"'1' \(BatchNorm1d\) mixes rows"),
    (nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 5)), r"'0' \(LazyLinear\) has no weights yet; call the module once"),
    (Returns(lambda y: y.softmax(1)), r"ends in a softmax or sigmoid .* must return logits"),
    (Returns(torch.sigmoid), r"ends in a softmax or sigmoid"),
    (nn.ReLU(), r"has no nn\.Linear or nn\.Conv2d layer"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "says"), REFUSED)
def test_refusals_are_sentences(module: nn.Module, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        from_module(module, example=rows(ROW))
    assert "\n" not in str(caught.value)


class OneConvBlock(nn.Module):
    """A block of one convolution with a shortcut beside it, which is called after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut, self.conv = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x) + self.shortcut(x)).mean((2, 3)))


def test_of_two_ways_of_one_length_the_one_with_more_weights_counts() -> None:
    """A 1x1 shortcut beside a single convolution is no deeper than it, and is called later."""
    assert from_module(OneConvBlock(), example=rows((3, 8, 8))).variational == ("conv",)


def test_an_embedding_that_is_too_small_is_named() -> None:
    """Ids that the data have and the table has not: a sentence with the number of entries that it needs."""
    module = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(8, 5))
    with pytest.raises(UserError, match=r"token ids 0 to 49, so that an nn\.Embedding of them needs 50 entries"):
        from_module(module, example=torch.tensor([[0, 0], [49, 49]]))
