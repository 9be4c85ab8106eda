"""Convolution, bias, ReLU and pooling as one operator, which a GPU computes in few kernels.

`conv_relu_pool` is a 3x3 convolution (stride 1, zeros around) with bias, ReLU and 2x2 max-pooling. Its kernels are
functions of one client with derivatives to any order and a rule for vmap, which hands all clients to one launch. Once
it is known which pixel of each window was taken, S, everything is linear in images and in weights, and so are the
derivatives:

    pick(x, b) = S (x + b)             unpick(g) = gradients by x and b
    conv(x, w) = x * w                 back(g, w) = gradient by x          slope(x, g) = gradient by w
    take(x, w, b) = S (x * w + b)      weigh(x, g) = gradients by w and b, for few input channels

The derivatives of each of these are again among them, which gives all orders.

Shape letters: C clients, B images, I and O channels, H x W pixels; images are (B, I, H, W), and lie in memory as
(B, H, W, C, I), see `conv_kernels`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import conv2d, max_pool2d, relu

from ..compat import is_transformed
from . import device
from .precision import BF16, EXACT, TF32

MOST_GROUPED = 128
"""Input channels up to which the weights' gradients of all clients are one grouped convolution; measured: with 256, ten
clients of 64 images of 16x16 pixels take 7.9 ms so on an H200, and 0.8 ms one after another."""
_INPUTS = {EXACT: "ieee", TF32: "tf32", BF16: "ieee"}


def conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, precision: str, *, flat: bool = False) -> Tensor:
    """3x3 convolution, bias, ReLU and 2x2 max-pooling, (B, I, H, W) -> (B, O, H/2, W/2).

    Kernels answer in bfloat16 if that is the precision, but not with `flat`, which means that a linear layer follows.
    The reference computes in the weight's type.
    """
    if not _has_kernels(x, weight.shape[-4]):
        return relu_pool(conv2d(convolvable(x.to(weight.dtype)), weight, bias, padding=1))
    given = x.to(torch.bfloat16 if precision == BF16 else torch.float32)
    if _few_channels(x):
        out, _ = _Block.apply(given, weight, bias, precision)
    else:
        out, _ = _Pool.apply(_Conv.apply(given, weight, False, precision), bias, flat)
    return out


def relu_pool(x: Tensor) -> Tensor:
    """2x2 max-pooling and ReLU; in this order, which gives the same bits, the ReLU has a quarter of the work."""
    return relu(max_pool2d(x, 2))


def convolvable(x: Tensor) -> Tensor:
    """Return images as a convolution takes them: its second derivative on a GPU asks how they lie in memory.

    Under vmap it knows one answer.
    """
    return x.contiguous() if x.is_cuda else x


def _has_kernels(x: Tensor, filters: int) -> bool:
    """Whether kernels compute such images with so many filters."""
    if x.dtype == torch.float64 or x.shape[-1] % 2 or x.shape[-2] % 2 or not device.has_kernels(x):
        return False
    return filters % 16 == 0 and (_few_channels(x) or x.shape[-3] % 8 == 0)


def _few_channels(x: Tensor) -> bool:
    """Whether all taps of all input channels fit one narrow product."""
    columns: int = _kernels().MOST_COLUMNS
    return 9 * x.shape[-3] <= columns


_kernels = partial(device.kernels, "conv")


def _in_memory_order(images: Tensor) -> Tensor:
    """Images (B, [C,] O, H, W) in the order of their memory, (B, H, W, [C,] O)."""
    if is_transformed(images):
        raise NotImplementedError("blocks are computed for one axis of clients; call them under one vmap, not two")
    return images.movedim((-2, -1), (1, 2))


def _laid_out(images: Tensor) -> Tensor:
    """Images (B, [C,] O, H, W) as they should lie in memory, which costs a copy only where they do not."""
    return _in_memory_order(images).contiguous()


def _as_images(images: Tensor) -> Tensor:
    """Undo `_laid_out`, without moving anything."""
    return images.movedim((1, 2), (-2, -1))


class _Pool(Function):
    """Bias, ReLU and pooling, (B, O, H, W), (O,) -> (B, O, H/2, W/2), and places; `flat`: a linear layer follows."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
        y, place = _kernels().pool(_laid_out(x), bias.contiguous(), flat=flat)
        return _as_images(y), _as_images(place)

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
        (images,), (biases,) = device.aligned(info, in_dims, x, axis=1), device.aligned(info, in_dims[1:], bias)
        return _Pool.forward(images, biases, flat), (1, 1)


class _Pick(Function):
    """The pooling with given places."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor, place: Tensor, flat: bool) -> Tensor:
        return _as_images(_kernels().pick(_laid_out(x), bias.contiguous(), _laid_out(place), flat=flat))

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
        (images,), (biases,) = device.aligned(info, in_dims, x, axis=1), device.aligned(info, in_dims[1:], bias)
        (places,) = device.aligned(info, in_dims[2:], place, axis=1)
        return _Pick.forward(images, biases, places, flat), 1


class _Unpick(Function):
    """Gradients by images, of a type, and biases."""

    @staticmethod
    def forward(g: Tensor, place: Tensor, dtype: torch.dtype, flat: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        x, total = _kernels().unpick(_in_memory_order(g), _laid_out(place), dtype)
        return _as_images(x), total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _, place, _, ctx.flat = inputs
        ctx.save_for_backward(place)

    @staticmethod
    def backward(ctx: Any, x: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        return _Pick.apply(x, bias, *ctx.saved_tensors, ctx.flat), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, place: Tensor, dtype: torch.dtype, flat: bool) -> Any:
        slopes, places = device.aligned(info, in_dims, g, place, axis=1)
        return _Unpick.forward(slopes, places, dtype, flat), (1, 0)


def _cast(value: Tensor, precision: str) -> Tensor:
    return value.to(torch.bfloat16) if precision == BF16 else value


def _grouped(images: Tensor) -> Tensor:
    """Images (B, C, O, H, W) as those of a grouped convolution, (B, C O, H, W)."""
    return _laid_out(images).flatten(3).permute(0, 3, 1, 2)


def _convolved(images: Tensor, weight: Tensor, *, back: bool, precision: str) -> Tensor:
    """Convolution of all clients: images (B, C, I, H, W), weight (C, O, I, 3, 3) -> (B, C, O, H, W).

    `back`: its transpose, (B, C, O, H, W) -> (B, C, I, H, W), as a convolution with the kernel turned round. cuDNN
    takes all groups at once for a convolution; a transposed one it often cuts into one launch per group.
    """
    clients, rows = len(weight), _grouped(_cast(images, precision))
    taps = _kernels().taps(weight, _kernels().AGAINST if back else _kernels().ALONG, rows.dtype)
    return conv2d(rows, taps, padding=1, groups=clients).unflatten(1, (clients, -1))


def _weight_gradient(x: Tensor, g: Tensor, *, precision: str) -> Tensor:
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


class _Conv(device.Operator):
    """The convolution, or its transpose (`back`): each is the other's derivative by the images."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, back: bool, precision: str) -> Tensor:
        return _convolved(x[:, None], weight[None], back=back, precision=precision)[:, 0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (back, precision) = ctx.saved_tensors, ctx.given
        by_x = _Conv.apply(g, weight, not back, precision) if ctx.needs_input_grad[0] else None
        pair = (g, x) if back else (x, g)
        by_weight = _Slope.apply(*pair, precision) if ctx.needs_input_grad[1] else None
        return by_x, by_weight, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, back: bool, precision: str) -> Any:
        (images,) = device.aligned(info, in_dims, x, axis=1)
        (weights,) = device.aligned(info, in_dims[1:], weight)
        return _convolved(images, weights, back=back, precision=precision), 1


class _Slope(device.Operator):
    @staticmethod
    def forward(x: Tensor, g: Tensor, precision: str) -> Tensor:
        return _weight_gradient(x[:, None], g[:, None], precision=precision)[0]

    @staticmethod
    def backward(ctx: Any, gw: Tensor) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        by_x = _Conv.apply(g, gw, True, *ctx.given) if ctx.needs_input_grad[0] else None
        by_g = _Conv.apply(x, gw, False, *ctx.given) if ctx.needs_input_grad[1] else None
        return by_x, by_g, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, g: Tensor, precision: str) -> Any:
        return _weight_gradient(*device.aligned(info, in_dims, x, g, axis=1), precision=precision), 0


def _take(x: Tensor, weight: Tensor, bias: Tensor, *, place: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """All clients' blocks: x (C, B, ...), weight (C, ...), bias (C, O), place (B, C, ...) -> (B, C, ...)."""
    taps = _kernels().taps(weight, _kernels().TAPS, x.dtype)
    given = None if place is None else _laid_out(place)
    y, where = _kernels().take(x, taps, bias.contiguous(), given, _INPUTS[precision])
    return _as_images(y), _as_images(where)


def _weigh(x: Tensor, g: Tensor, place: Tensor, *, precision: str) -> tuple[Tensor, Tensor]:
    gw, gb = _kernels().weigh(x, _laid_out(_cast(g, precision)), _laid_out(place), _INPUTS[precision])
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
        return (None,) * 4 if g is None else (*_block_gradients(ctx, g), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, precision: str) -> Any:
        return _take(*device.aligned(info, in_dims, x, weight, bias), place=None, precision=precision), (1, 1)


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
        return (*_block_gradients(ctx, g), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, b: Tensor, place: Tensor, precision: str) -> Any:
        (given,) = device.aligned(info, in_dims[3:], place, axis=1)
        return _take(*device.aligned(info, in_dims, x, w, b), place=given, precision=precision)[0], 1


def _block_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients by images, weights and biases of a block, or of one with given places."""
    x, weight, place = ctx.saved_tensors
    gw, gb = _Weigh.apply(x, g, place, ctx.precision)
    return _image_gradient(g, weight, place, ctx.precision) if ctx.needs_input_grad[0] else None, gw, gb


def _image_gradient(g: Tensor, weight: Tensor, place: Tensor, precision: str) -> Tensor:
    """Return the gradient by a block's images."""
    unpicked, _ = _Unpick.apply(g, place, g.dtype, False)
    return _Conv.apply(unpicked, weight, True, precision)


class _Weigh(device.Operator):
    @staticmethod
    def forward(x: Tensor, g: Tensor, place: Tensor, precision: str) -> tuple[Tensor, Tensor]:
        gw, gb = _weigh(x[None], g[:, None], place[:, None], precision=precision)
        return gw[0], gb[0]

    @staticmethod
    def backward(ctx: Any, gw: Tensor, gb: Tensor) -> tuple[Tensor | None, ...]:
        x, g, place = ctx.saved_tensors
        by_x = _image_gradient(g, gw, place, *ctx.given) if ctx.needs_input_grad[0] else None
        by_g = _Take.apply(x, gw, gb, place, *ctx.given) if ctx.needs_input_grad[1] else None
        return by_x, by_g, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, g: Tensor, place: Tensor, precision: str) -> Any:
        (images,) = device.aligned(info, in_dims, x)
        return _weigh(images, *device.aligned(info, in_dims[1:], g, place, axis=1), precision=precision), (0, 0)
