"""Triton kernels of convolution, bias, ReLU and pooling. `conv` makes operators of them.

Images of many clients lie in memory as (B, H, W, C, O), the channels of a pixel side by side, client after client:
what a grouped convolution reads without a copy. Sums are taken in a fixed order, without atomics, so results are the
same in every run, and a client's do not depend on who is computed beside it.

Shape letters: C clients, B images, H x W pixels, I input and O output channels.

`place` says which of the four pixels of a 2x2 window was taken, 0 to 3 in reading order, and 4 where the ReLU let
nothing through.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

_BLOCK = 1024
_CHUNK = 256
"""Windows whose share of a weight's gradient one program sums."""
_GET = {"ROWS": 16, "BLOCK": 64}
"""Windows and channels that one program pools."""
_PUT = {"CHUNK": 64, "ROWS": 32, "BLOCK": 64}
"""Windows that one program puts back, how many of them at once, and channels."""


@triton.jit
def _corner(window, H, W):
    """Return image, row and column of the first pixel of a window."""
    area = (H // 2) * (W // 2)
    inside = window % area
    return window // area, 2 * (inside // (W // 2)), 2 * (inside % (W // 2))


@triton.jit
def _tile(windows, channels, H, W, CHUNK, ROWS: tl.constexpr, BLOCK: tl.constexpr, step):
    """Return windows and channels of a part of a program's tile, which of them exist, and each window's corner."""
    window = (tl.program_id(0).to(tl.int64) * CHUNK + step + tl.arange(0, ROWS))[:, None]
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    image, top, left = _corner(window, H, W)
    return window, channel, (window < windows) & (channel < channels), image, top, left


@triton.jit
def _pooled(image, top, left, channel, sb, sh, sw, sc, so, O):
    """Return where a window's value lies in pooled images with such strides."""
    return image * sb + top // 2 * sh + left // 2 * sw + channel // O * sc + channel % O * so


@kernel()
def _pool(
    x, bias, y, place, channels, windows, yb, yh, yw, yc, yo,
    H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    window, channel, here, image, top, left = _tile(windows, channels, H, W, ROWS, ROWS, BLOCK, 0)
    first = ((image * H + top) * W + left) * channels + channel
    value = tl.load(x + first, mask=here, other=0.0).to(tl.float32)
    which = tl.zeros((ROWS, BLOCK), tl.int32)
    for k in tl.static_range(1, 4):
        other = tl.load(x + first + ((k // 2) * W + k % 2) * channels, mask=here, other=0.0).to(tl.float32)
        which = tl.where(other > value, k, which)
        # A NaN is not hidden: it is taken, and stays.
        value = tl.where((other > value) | (other != other), other, value)
    value += tl.load(bias + channel, mask=channel < channels, other=0.0)
    which = tl.where(value > 0, which, 4)
    value = tl.where(value <= 0, 0.0, value)
    tl.store(place + window * channels + channel, which.to(tl.int8), mask=here)
    out = _pooled(image, top, left, channel, yb, yh, yw, yc, yo, O)
    tl.store(y + out, value.to(y.dtype.element_ty), mask=here)


@kernel()
def _pick(
    x, bias, place, y, channels, windows, yb, yh, yw, yc, yo,
    H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    window, channel, here, image, top, left = _tile(windows, channels, H, W, ROWS, ROWS, BLOCK, 0)
    which = tl.load(place + window * channels + channel, mask=here, other=4)
    chosen = here & (which < 4)
    first = ((image * H + top + which // 2) * W + left + which % 2) * channels + channel
    value = tl.load(x + first, mask=chosen, other=0.0).to(tl.float32)
    value += tl.where(chosen, tl.load(bias + channel, mask=channel < channels, other=0.0), 0.0)
    out = _pooled(image, top, left, channel, yb, yh, yw, yc, yo, O)
    tl.store(y + out, value.to(y.dtype.element_ty), mask=here)


@kernel()
def _unpick(
    g, place, x, sums, channels, windows, gb, gh, gw, gc, go,
    H: tl.constexpr, W: tl.constexpr, O: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put a chunk of windows back, and sum a channel's."""
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, CHUNK, ROWS):
        window, channel, here, image, top, left = _tile(windows, channels, H, W, CHUNK, ROWS, BLOCK, step)
        which = tl.load(place + window * channels + channel, mask=here, other=4)
        at = _pooled(image, top, left, channel, gb, gh, gw, gc, go, O)
        slope = tl.load(g + at, mask=here, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(which < 4, slope, 0.0), 0)
        first = ((image * H + top) * W + left) * channels + channel
        for k in tl.static_range(4):
            out = tl.where(which == k, slope, 0.0)
            tl.store(x + first + ((k // 2) * W + k % 2) * channels, out.to(x.dtype.element_ty), mask=here)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0) * channels + cols, total, mask=cols < channels)


@kernel()
def _taps(w, out, I: tl.constexpr, O: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """Lay a client's weights (O, I, 3, 3) out anew, in another type; `taps` says how."""
    first = tl.program_id(1).to(tl.int64) * (9 * I * O)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = inside < 9 * I * O
    if MODE == 0:
        o, tap, i = inside // (9 * I), inside // I % 9, inside % I
    elif MODE == 1:
        i, tap, o = inside // (9 * O), 8 - inside // O % 9, inside % O
    else:
        tap, i, o = inside // (I * O), inside // O % I, inside % O
    value = tl.load(w + first + ((o * I + i) * 9 + tap), mask=here, other=0.0)
    tl.store(out + first + inside, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _seen(x, here, image, top, left, ks, sb, sy, sx, si, H, W, I):
    """Return what taps and channels see of pixels, (taps and channels, pixels).

    In this order threads have pixels, and each has all taps of its own: what differs from tap to tap is then a constant
    of the program, and only what differs from pixel to pixel is computed.
    """
    dy, dx = (ks // I // 3 - 1)[:, None], (ks // I % 3 - 1)[:, None]
    iy, ix = top[None, :] + dy, left[None, :] + dx
    ok = here[None, :] & (ks < 9 * I)[:, None] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    pixel = x + (image.to(tl.int64) * sb + top * sy + left * sx)
    return tl.load(pixel[None, :] + (dy * sy + dx * sx + (ks % I * si)[:, None]), mask=ok, other=0.0)


@kernel(do_not_specialize=["clients"])
def _take(
    x, w, bias, given, y, place, windows, clients, sc, sb, sy: tl.constexpr, sx: tl.constexpr, si: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, O: tl.constexpr,
    P: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, PICK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * BO + tl.arange(0, BO)
    # The four pixels of a window lie P rows apart: they end in the same thread, and pooling moves no data.
    rows = tl.arange(0, 4 * P)
    window = tl.program_id(0) * P + rows % P
    image, top, left = _corner(window, H, W)
    top += rows // P // 2
    left += rows // P % 2
    ks = tl.arange(0, BK)
    a = _seen(x + client * sc, window < windows, image, top, left, ks, sb, sy, sx, si, H, W, I)
    b = tl.load(w + client * (9 * I * O) + ks[:, None] * O + cols[None, :], mask=(ks < 9 * I)[:, None], other=0.0)
    acc = tl.dot(tl.trans(a), b, input_precision=PRECISION) + tl.load(bias + client * O + cols)[None, :]
    four = tl.reshape(acc, (4, P, BO))
    window = tl.program_id(0) * P + tl.arange(0, P)
    out = (window.to(tl.int64) * clients + client)[:, None] * O + cols[None, :]
    here = (window < windows)[:, None]
    if PICK:
        chosen = tl.load(given + out, mask=here, other=4)
        value = tl.sum(tl.where(chosen[None, :, :] == tl.arange(0, 4)[:, None, None], four, 0.0), 0)
    else:
        value, which = tl.max(four, 0, return_indices=True)
        tl.store(place + out, tl.where(value > 0, which, 4).to(tl.int8), mask=here)
        value = tl.where(value <= 0, 0.0, value)
    tl.store(y + out, value.to(y.dtype.element_ty), mask=here)


@kernel(do_not_specialize=["clients"])
def _weigh(
    x, g, place, gw, gb, windows, clients, sc, sb, sy: tl.constexpr, sx: tl.constexpr, si: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, O: tl.constexpr,
    P: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    client = tl.program_id(2).to(tl.int64)
    outs = tl.program_id(1) * BO + tl.arange(0, BO)
    ks = tl.arange(0, BK)
    acc = tl.zeros((BO, BK), tl.float32)
    total = tl.zeros((BO,), tl.float32)
    for step in range(0, CHUNK, P):
        window = chunk * CHUNK + step + tl.arange(0, P)
        here = window < windows
        image, top, left = _corner(window, H, W)
        at = (window.to(tl.int64) * clients + client)[:, None] * O + outs[None, :]
        # Where there is no window the slope is 0, whichever pixel is read as taken.
        which = tl.load(place + at, mask=here[:, None], other=0).to(tl.uint8)
        slope = tl.load(g + at, mask=here[:, None], other=0.0)
        total += tl.sum(tl.where(which < 4, slope, 0.0).to(tl.float32), 0)
        for k in tl.static_range(4):
            a = _seen(x + client * sc, here, image, top + k // 2, left + k % 2, ks, sb, sy, sx, si, H, W, I)
            taken = tl.where(which == k, slope, 0.0)
            acc = tl.dot(tl.trans(taken), tl.trans(a), acc, input_precision=PRECISION)
    part = client * tl.num_programs(0) + chunk
    out = part * (O * I * 9) + outs[:, None] * (I * 9) + (ks % I * 9 + ks // I)[None, :]
    tl.store(gw + out, acc, mask=(ks < 9 * I)[None, :])
    tl.store(gb + part * O + outs, total)


def _room(like: Tensor, flat: bool) -> Tensor:
    """Room for images (B, h, w, [C,] O), half as high and wide: as they lie, or as `flatten` wants them, see `pool`."""
    B, H, W, *clients, outputs = like.shape
    if not flat:
        return like.new_empty(B, H // 2, W // 2, *clients, outputs)
    out = torch.empty(*clients, B, outputs, H // 2, W // 2, dtype=torch.float32, device=like.device)
    return out.permute(1, 3, 4, 0, 2) if clients else out.permute(0, 2, 3, 1)


def _windows(y: Tensor) -> tuple[int, ...]:
    """Number of channels of all clients and of windows of pooled images (B, h, w, [C,] O), and its five strides."""
    b, h, w, *clients, o = y.stride()
    channels = y.shape[3:].numel()
    return channels, y.numel() // channels, b, h, w, clients[0] if clients else 0, o


def _over(windows: tuple[int, ...], tile: dict[str, int]) -> tuple[int, int]:
    """Return the grid of programs over windows and channels."""
    return triton.cdiv(windows[1], tile.get("CHUNK", tile["ROWS"])), triton.cdiv(windows[0], tile["BLOCK"])


def pool(x: Tensor, bias: Tensor, *, flat: bool) -> tuple[Tensor, Tensor]:
    """Bias, ReLU and 2x2 max-pooling of contiguous images (B, H, W, ...), bias (...); also return the places.

    `flat` answers in float32, and in the order ([C,] B, O, h, w), of which a linear layer takes the rows as they are.
    """
    y = _room(x, flat)
    place = torch.empty(y.shape, dtype=torch.int8, device=x.device)
    sizes = _windows(y)
    _pool[_over(sizes, _GET)](x, bias, y, place, *sizes, H=x.shape[1], W=x.shape[2], O=x.shape[-1], **_GET)
    return y, place


def pick(x: Tensor, bias: Tensor, place: Tensor, *, flat: bool) -> Tensor:
    """Take the given places of (B, H, W, ...) -> (B, H/2, W/2, ...), and add the bias; 0 where there is no place."""
    y = _room(x, flat)
    sizes = _windows(y)
    _pick[_over(sizes, _GET)](x, bias, place, y, *sizes, H=x.shape[1], W=x.shape[2], O=x.shape[-1], **_GET)
    return y


def unpick(g: Tensor, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Put (B, H/2, W/2, ...) back where it was taken from, zeros elsewhere; also return its sum a channel, (...).

    g may lie in memory as it likes.
    """
    B, h, w, *channels = g.shape
    x = torch.empty(B, 2 * h, 2 * w, *channels, dtype=dtype, device=g.device)
    sizes = _windows(g)
    grid = _over(sizes, _PUT)
    sums = torch.empty(grid[0], *channels, dtype=torch.float32, device=g.device)
    _unpick[grid](g, place, x, sums, *sizes, H=2 * h, W=2 * w, O=channels[-1], **_PUT)
    return x, sums.sum(0)


ALONG, AGAINST, TAPS = 0, 1, 2


def taps(weight: Tensor, mode: int, dtype: torch.dtype) -> Tensor:
    """Lay weights (C, O, I, 3, 3) out as a convolution reads them.

    ALONG: (C O, I, 3, 3), channels last; AGAINST: (C I, O, 3, 3), turned round, channels last; TAPS: (C, 3, 3, I, O).
    """
    C, O, I = weight.shape[:3]
    weight = weight.contiguous()
    if mode == TAPS:
        out = torch.empty(C, 3, 3, I, O, dtype=dtype, device=weight.device)
    else:
        outer, inner = (C * O, I) if mode == ALONG else (C * I, O)
        out = torch.empty(outer, 3, 3, inner, dtype=dtype, device=weight.device)
    _taps[(triton.cdiv(9 * I * O, _BLOCK), C)](weight, out, I=I, O=O, MODE=mode, BLOCK=_BLOCK)
    return out if mode == TAPS else out.permute(0, 3, 1, 2)


MOST_COLUMNS = 64
"""Taps times channels that one narrow product may have: seven channels."""
_TAKE = {"P": 64, "num_warps": 4, "num_stages": 3}
_WEIGH = {"P": 128, "num_warps": 4, "num_stages": 3}
_FLOAT_TAKE = {"P": 32, "num_warps": 4, "num_stages": 3}
_FLOAT_WEIGH = {"P": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
"""With as many registers, three programs share a multiprocessor."""


def _columns(channels: int) -> int:
    return max(16, triton.next_power_of_2(9 * channels))


def _filters(count: int) -> int:
    """Return the largest power of two that divides the number of filters, up to 64."""
    return min(count & -count, 64)


def _in_one_piece(x: Tensor) -> Tensor:
    """Return images (C, B, I, H, W) of which each is one piece of memory; they are copied only where they are not.

    Kernels are compiled for the strides in an image: these must not depend on the number of clients.
    """
    span = sum((size - 1) * step for size, step in zip(x.shape[2:], x.stride()[2:], strict=True))
    return x if span < x.shape[2:].numel() else x.contiguous()


def take(x: Tensor, weight: Tensor, bias: Tensor, given: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """Convolve, rectify and pool images of few channels; return what is left and where it came from.

    x (C, B, I, H, W) with any strides, weight (C, 3, 3, I, O), bias (C, O) -> (B, H/2, W/2, C, O) twice. With `given`
    places, those are taken.
    """
    C, B, I, H, W = x.shape
    O = weight.shape[-1]
    y = x.new_empty(B, H // 2, W // 2, C, O)
    place = torch.empty(y.shape, dtype=torch.int8, device=x.device) if given is None else given
    windows = B * (H // 2) * (W // 2)
    config = _FLOAT_TAKE if x.dtype == torch.float32 else _TAKE
    wide = _filters(O)
    x = _in_one_piece(x)
    sc, sb, si, sy, sx = x.stride()
    _take[(triton.cdiv(windows, config["P"]), O // wide, C)](
        x, weight, bias, place, y, place, windows, C, sc, sb, sy, sx, si, H=H, W=W, I=I, O=O, BO=wide,
        BK=_columns(I), PICK=given is not None, PRECISION=precision, **config,
    )  # fmt: skip
    return y, place


def weigh(x: Tensor, g: Tensor, place: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return the gradients by weights (C, O, I, 3, 3) and biases (C, O), in float32. g, place (B, H/2, W/2, C, O)."""
    C, B, I, H, W = x.shape
    O = g.shape[-1]
    windows = B * (H // 2) * (W // 2)
    config = _FLOAT_WEIGH if x.dtype == torch.float32 else _WEIGH
    chunks = triton.cdiv(windows, _CHUNK)
    gw = torch.empty(C, chunks, O, I, 3, 3, dtype=torch.float32, device=x.device)
    gb = torch.empty(C, chunks, O, dtype=torch.float32, device=x.device)
    wide = _filters(O)
    x = _in_one_piece(x)
    sc, sb, si, sy, sx = x.stride()
    _weigh[(chunks, O // wide, C)](
        x, g, place, gw, gb, windows, C, sc, sb, sy, sx, si, H=H, W=W, I=I, O=O, BO=wide, BK=_columns(I),
        CHUNK=_CHUNK, PRECISION=precision, **config,
    )  # fmt: skip
    return gw.sum(1), gb.sum(1)
