"""Operators that a GPU computes in one kernel where PyTorch would launch many; `kernels` holds the kernels.

Each is a function of one client, as everything in `core`, with its derivatives to any order and its rule for vmap,
which hands all clients to one launch. `block` is a 3x3 convolution (stride 1, zeros around) with bias, ReLU and 2x2
max-pooling; `pool` is its last part, bias, ReLU and pooling. Once it is known which pixel of each window was taken,
S, everything is linear in images and in weights, and so are the derivatives:

    pick(x, b) = S (x + b)             unpick(g) = gradients by x and b
    conv(x, w) = x * w                 back(g, w) = gradient by x          slope(x, g) = gradient by w
    take(x, w, b) = S (x * w + b)      weigh(x, g) = gradients by w and b, for few input channels

The derivatives of each of these are again among them, which gives all orders.

Shape letters: C clients, B images, I and O channels, H x W pixels; images are (B, I, H, W), and lie in memory as
(B, H, W, C, I), see `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import conv2d

EXACT, TF32, BF16 = "exact", "tf32", "bf16"
PRECISIONS = (EXACT, TF32, BF16)
"""How products are computed: in float32, in float32 with 10 bits of mantissa, in bfloat16; sums always in float32."""
MOST_GROUPED = 128
"""Input channels up to which the weights' gradients of all clients are one grouped convolution; measured: with 256, ten
clients of 64 images of 16x16 pixels take 7.9 ms so on an H200, and 0.8 ms one after another."""
_INPUTS = {EXACT: "ieee", TF32: "tf32", BF16: "ieee"}


@cache
def ready() -> bool:
    """Whether kernels of our own can run here: a GPU, Triton, and the C compiler that it needs."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    try:
        _kernels().normal(torch.zeros(1, dtype=torch.int64, device="cuda"), 1)
    except Exception:  # whatever keeps Triton from compiling: PyTorch's own operators are always there
        return False
    return True


def rehearse(function: Callable[[], Any]) -> None:
    """Call a function to compile its kernels side by side; what it computes is nonsense, and the caller's to undo."""
    if ready():
        from .launch import rehearse  # noqa: PLC0415  Triton need not be installed

        rehearse(function)


def poolable(x: Tensor) -> bool:
    """Whether `pool` computes such images."""
    return x.is_cuda and x.dtype != torch.float64 and x.shape[-1] % 2 == 0 and x.shape[-2] % 2 == 0 and ready()


def blockable(x: Tensor, filters: int) -> bool:
    """Whether `block` computes such images with so many filters."""
    if not poolable(x):
        return False
    return filters % 16 == 0 and (_few(x) or x.shape[-3] % 8 == 0)


def _few(x: Tensor) -> bool:
    """Whether all taps of all input channels fit one narrow product."""
    columns: int = _kernels().MOST_COLUMNS
    return 9 * x.shape[-3] <= columns


def pool(x: Tensor, bias: Tensor, *, flat: bool = False) -> Tensor:
    """Bias, ReLU and 2x2 max-pooling: (B, O, H, W), (O,) -> (B, O, H/2, W/2); `flat` if a linear layer comes next."""
    out, _ = _Pool.apply(x, bias, flat)
    return out


def block(x: Tensor, weight: Tensor, bias: Tensor, precision: str, *, flat: bool = False) -> Tensor:
    """Convolution, bias, ReLU and pooling, (B, I, H, W) -> (B, O, H/2, W/2).

    The answer is in bfloat16 if that is the precision, but not with `flat`, which means that a linear layer follows.
    """
    given = x.to(torch.bfloat16 if precision == BF16 else torch.float32)
    if not _few(x):
        return pool(_Conv.apply(given, weight, precision), bias, flat=flat)
    out, _ = _Block.apply(given, weight, bias, precision)
    return out


def normals(keys: Tensor, count: int) -> Tensor:
    """Return `count` standard normals a key, (*keys.shape, count)."""
    return _Normals.apply(keys, count)


def gate(slope: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Return the slope, but 0 where it leads x further out of [low, high]: x <= low and it is >= 0, or the reverse."""
    return _Gate.apply(slope, x, low, high)


def outward(slope: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Return where a slope leads x further out of [low, high], or along its edge."""
    return torch.where(slope < 0, x >= high, x <= low)


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of int64 numbers, see `rng`."""
    return _Mix.apply(z)


def images(
    x: Tensor, y: Tensor, rows: Tensor, keys: Tensor | None, look: tuple[float, Tensor, Tensor], pad: int
) -> tuple[Tensor, Tensor]:
    """Return rows (..., B) of a dataset's images as a network sees them, and their labels, see `cohort.Pool`.

    No derivative, no vmap.
    """
    seen, labels = _kernels().images(x, y, rows, keys, look, pad)
    return seen, labels


def _kernels() -> Any:
    from . import kernels  # noqa: PLC0415  Triton need not be installed

    return kernels


def aligned(info: Any, in_dims: tuple[int | None, ...], *values: Tensor, axis: int = 0) -> list[Tensor]:
    """Bring the client axis of every argument to one place; what clients share is repeated."""
    return [
        value.unsqueeze(axis).expand(*value.shape[:axis], info.batch_size, *value.shape[axis:])
        if dim is None
        else value.movedim(dim, axis)
        for value, dim in zip(values, in_dims, strict=False)
    ]


def _seen(images: Tensor) -> Tensor:
    """Images (B, [C,] O, H, W) in the order of their memory, (B, H, W, [C,] O)."""
    if torch._C._functorch.is_functorch_wrapped_tensor(images):
        raise NotImplementedError("blocks are computed for one axis of clients; call them under one vmap, not two")
    return images.movedim((-2, -1), (1, 2))


def _flat(images: Tensor) -> Tensor:
    """Images (B, [C,] O, H, W) as they should lie in memory, which costs a copy only where they do not."""
    return _seen(images).contiguous()


def _deep(images: Tensor) -> Tensor:
    """Undo `_flat`, without moving anything."""
    return images.movedim((1, 2), (-2, -1))


class _Pool(Function):
    @staticmethod
    def forward(x: Tensor, bias: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
        y, place = _kernels().pool(_flat(x), bias.contiguous(), flat=flat)
        return _deep(y), _deep(place)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype, ctx.flat = inputs[0].dtype, inputs[2]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None
        return (*_Unpick.apply(g, *ctx.saved_tensors, ctx.dtype, ctx.flat), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, bias: Tensor, flat: bool) -> Any:
        (images,), (biases,) = aligned(info, in_dims, x, axis=1), aligned(info, in_dims[1:], bias)
        return _Pool.forward(images, biases, flat), (1, 1)


class _Pick(Function):
    """The pooling with given places."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor, place: Tensor, flat: bool) -> Tensor:
        return _deep(_kernels().pick(_flat(x), bias.contiguous(), _flat(place), flat=flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        x, _, place, ctx.flat = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(place)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*_Unpick.apply(g, *ctx.saved_tensors, ctx.dtype, ctx.flat), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, bias: Tensor, place: Tensor, flat: bool) -> Any:
        (images,), (biases,) = aligned(info, in_dims, x, axis=1), aligned(info, in_dims[1:], bias)
        (places,) = aligned(info, in_dims[2:], place, axis=1)
        return _Pick.forward(images, biases, places, flat), 1


class _Unpick(Function):
    """Gradients by images, of a type, and biases."""

    @staticmethod
    def forward(g: Tensor, place: Tensor, dtype: torch.dtype, flat: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        x, total = _kernels().unpick(_seen(g), _flat(place), dtype)
        return _deep(x), total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _, place, _, ctx.flat = inputs
        ctx.save_for_backward(place)

    @staticmethod
    def backward(ctx: Any, x: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        return _Pick.apply(x, bias, *ctx.saved_tensors, ctx.flat), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, place: Tensor, dtype: torch.dtype, flat: bool) -> Any:
        slopes, places = aligned(info, in_dims, g, place, axis=1)
        return _Unpick.forward(slopes, places, dtype, flat), (1, 0)


def _cast(value: Tensor, precision: str) -> Tensor:
    return value.to(torch.bfloat16) if precision == BF16 else value


def _grouped(images: Tensor) -> Tensor:
    """Images (B, C, O, H, W) as those of a grouped convolution, (B, C O, H, W)."""
    return _flat(images).flatten(3).permute(0, 3, 1, 2)


def _ungrouped(images: Tensor, clients: int) -> Tensor:
    return images.unflatten(1, (clients, -1))


def _along(images: Tensor, weight: Tensor, *, precision: str) -> Tensor:
    """Convolution of all clients: images (B, C, I, H, W), weight (C, O, I, 3, 3) -> (B, C, O, H, W)."""
    return _convolved(images, weight, _kernels().ALONG, precision)


def _against(images: Tensor, weight: Tensor, *, precision: str) -> Tensor:
    """Its transpose, (B, C, O, H, W) -> (B, C, I, H, W), as a convolution with the kernel turned round.

    cuDNN takes all groups at once for a convolution; a transposed one it often cuts into a launch a group.
    """
    return _convolved(images, weight, _kernels().AGAINST, precision)


def _convolved(images: Tensor, weight: Tensor, mode: int, precision: str) -> Tensor:
    clients, rows = len(weight), _grouped(_cast(images, precision))
    taps = _kernels().taps(weight, mode, rows.dtype)
    return _ungrouped(conv2d(rows, taps, padding=1, groups=clients), clients)


def _steepness(x: Tensor, g: Tensor, *, precision: str) -> Tensor:
    """Gradient by the weights: x (B, C, I, H, W), g (B, C, O, H, W) -> (C, O, I, 3, 3)."""
    clients, inputs, outputs = x.shape[1], x.shape[2], g.shape[2]
    images, slopes = (_grouped(_cast(value, precision)) for value in (x, g))
    # A wide gradient fills the GPU alone, and cuDNN is slow to compute several.
    groups = clients if inputs <= MOST_GROUPED else 1
    like = images.new_empty(1).expand(groups * outputs, inputs, 3, 3)
    parts = [
        torch.ops.aten.convolution_backward(
            slope, image, like, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [False, True, False]
        )[1]
        for slope, image in zip(slopes.chunk(clients // groups, 1), images.chunk(clients // groups, 1), strict=True)
    ]
    gw = torch.cat(parts) if len(parts) > 1 else parts[0]
    return gw.to(torch.float32, memory_format=torch.contiguous_format).unflatten(0, (clients, outputs))


class _Conv(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, precision: str) -> Tensor:
        return _along(x[:, None], weight[None], precision=precision)[:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        x, weight, ctx.precision = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x = _Back.apply(g, weight, ctx.precision) if ctx.needs_input_grad[0] else None
        by_weight = _Slope.apply(x, g, ctx.precision) if ctx.needs_input_grad[1] else None
        return by_x, by_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, precision: str) -> Any:
        (images,) = aligned(info, in_dims, x, axis=1)
        return _along(images, *aligned(info, in_dims[1:], weight), precision=precision), 1


class _Back(Function):
    @staticmethod
    def forward(g: Tensor, weight: Tensor, precision: str) -> Tensor:
        return _against(g[:, None], weight[None], precision=precision)[:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        g, weight, ctx.precision = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, gx: Tensor) -> tuple[Tensor | None, ...]:
        g, weight = ctx.saved_tensors
        by_g = _Conv.apply(gx, weight, ctx.precision) if ctx.needs_input_grad[0] else None
        by_weight = _Slope.apply(gx, g, ctx.precision) if ctx.needs_input_grad[1] else None
        return by_g, by_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, weight: Tensor, precision: str) -> Any:
        (slopes,) = aligned(info, in_dims, g, axis=1)
        return _against(slopes, *aligned(info, in_dims[1:], weight), precision=precision), 1


class _Slope(Function):
    @staticmethod
    def forward(x: Tensor, g: Tensor, precision: str) -> Tensor:
        return _steepness(x[:, None], g[:, None], precision=precision)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        x, g, ctx.precision = inputs
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, gw: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        by_x = _Back.apply(g, gw, ctx.precision) if ctx.needs_input_grad[0] else None
        by_g = _Conv.apply(x, gw, ctx.precision) if ctx.needs_input_grad[1] else None
        return by_x, by_g, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, g: Tensor, precision: str) -> Any:
        return _steepness(*aligned(info, in_dims, x, g, axis=1), precision=precision), 0


def _take(x: Tensor, weight: Tensor, bias: Tensor, *, place: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """All clients' blocks: x (C, B, ...), weight (C, ...), bias (C, O), place (B, C, ...) -> (B, C, ...)."""
    taps = _kernels().taps(weight, _kernels().TAPS, x.dtype)
    given = None if place is None else _flat(place)
    y, where = _kernels().take(x, taps, bias.contiguous(), given, _INPUTS[precision])
    return _deep(y), _deep(where)


def _weigh(x: Tensor, g: Tensor, place: Tensor, *, precision: str) -> tuple[Tensor, Tensor]:
    gw, gb = _kernels().weigh(x, _flat(_cast(g, precision)), _flat(place), _INPUTS[precision])
    return gw, gb


class _Block(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, precision: str) -> tuple[Tensor, Tensor]:
        y, place = _take(x[None], weight[None], bias[None], place=None, precision=precision)
        return y[:, 0], place[:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.precision = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return (None,) * 4 if g is None else (*_slopes(ctx, g), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, precision: str) -> Any:
        return _take(*aligned(info, in_dims, x, weight, bias), place=None, precision=precision), (1, 1)


class _Take(Function):
    """The block with given places."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, place: Tensor, precision: str) -> Tensor:
        return _take(x[None], weight[None], bias[None], place=place[:, None], precision=precision)[0][:, 0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        x, weight, _, place, ctx.precision = inputs
        ctx.save_for_backward(x, weight, place)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*_slopes(ctx, g), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor, place: Tensor, precision: str) -> Any:
        (given,) = aligned(info, in_dims[3:], place, axis=1)
        return _take(*aligned(info, in_dims, x, w, b), place=given, precision=precision)[0], 1


def _slopes(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients by images, weights and biases of a block, or of one with given places."""
    x, weight, place = ctx.saved_tensors
    gw, gb = _Weigh.apply(x, g, place, ctx.precision)
    return _images(g, weight, place, ctx) if ctx.needs_input_grad[0] else None, gw, gb


def _images(g: Tensor, weight: Tensor, place: Tensor, ctx: Any) -> Tensor:
    """Return the gradient by a block's images."""
    unpicked, _ = _Unpick.apply(g, place, g.dtype, False)
    return _Back.apply(unpicked, weight, ctx.precision)


class _Weigh(Function):
    @staticmethod
    def forward(x: Tensor, g: Tensor, place: Tensor, precision: str) -> tuple[Tensor, Tensor]:
        gw, gb = _weigh(x[None], g[:, None], place[:, None], precision=precision)
        return gw[0], gb[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        x, g, place, ctx.precision = inputs
        ctx.save_for_backward(x, g, place)

    @staticmethod
    def backward(ctx: Any, gw: Tensor, gb: Tensor) -> tuple[Tensor | None, ...]:
        x, g, place = ctx.saved_tensors
        by_x = _images(g, gw, place, ctx) if ctx.needs_input_grad[0] else None
        by_g = _Take.apply(x, gw, gb, place, ctx.precision) if ctx.needs_input_grad[1] else None
        return by_x, by_g, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, g: Tensor, place: Tensor, precision: str) -> Any:
        (images,) = aligned(info, in_dims, x)
        return _weigh(images, *aligned(info, in_dims[1:], g, place, axis=1), precision=precision), (0, 0)


class _Gate(Function):
    @staticmethod
    def forward(slope: Tensor, x: Tensor, low: float, high: float) -> Tensor:
        let: Tensor = _kernels().gate(slope, x, low, high)
        return let

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        slope, x, ctx.low, ctx.high = inputs
        ctx.save_for_backward(slope, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        slope, x = ctx.saved_tensors
        return g.masked_fill(outward(slope, x, ctx.low, ctx.high), 0.0), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, slope: Tensor, x: Tensor, low: float, high: float) -> Any:
        return _Gate.apply(*aligned(info, in_dims, slope, x), low, high), 0


class _Mix(Function):
    @staticmethod
    def forward(z: Tensor) -> Tensor:
        mixed: Tensor = _kernels().mix(z)
        return mixed

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:  # noqa: ARG004
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, z: Tensor) -> Any:
        # Applied, not launched: there may be a vmap around this one.
        return _Mix.apply(*aligned(info, in_dims, z)), 0


class _Normals(Function):
    @staticmethod
    def forward(keys: Tensor, count: int) -> Tensor:
        drawn: Tensor = _kernels().normal(keys, count)
        return drawn

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, keys: Tensor, count: int) -> Any:
        return _Normals.apply(*aligned(info, in_dims, keys), count), 0
