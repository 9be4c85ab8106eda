"""Triton kernel of the binary tree of a client's classes, one program per client. `class_tree` makes an operator of it.

Shape letters: C clients, K classes, J = K - 1 nodes; BLOCK is K rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

MOST_CLASSES = 128
"""A program holds the squared distances of all classes in its registers."""


@triton.jit
def _over_node(same, values):
    """Sum values (BLOCK,) over the classes of every class's node."""
    return tl.sum(tl.where(same, values[None, :], 0.0), 1)


@kernel()
def _class_tree(square, present, left, right, nodes, K, iterations, BLOCK: tl.constexpr):
    """As `class_tree._by_depth` and `_split`, which say why."""
    client = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    row, column = index[:, None], index[None, :]
    distance = tl.load(square + client * K * K + row * K + column, mask=(row < K) & (column < K), other=0.0)
    there = tl.load(present + client * K + index, mask=index < K, other=0.0) > 0
    several = tl.sum(there.to(tl.int32), 0) >= 2
    node = tl.where(there & several, 0, -1)
    tail = 1
    while tl.max(node, 0) >= 0:
        same = (node[:, None] == node[None, :]) & (node[:, None] >= 0)
        reach = tl.max(tl.where(same & (row < column), distance, -1.0), 1)
        most = tl.max(tl.where(same, reach[None, :], -1.0), 1)
        first = tl.min(tl.where(same & (reach[None, :] == most[:, None]), column, BLOCK - 1), 1)
        to_first = tl.sum(tl.where(column == first[:, None], distance, 0.0), 1)
        later = same & (column > first[:, None]) & (to_first[None, :] == most[:, None])
        second = tl.min(tl.where(later, column, BLOCK - 1), 1)
        to_second = tl.sum(tl.where(column == second[:, None], distance, 0.0), 1)
        goes = tl.where(((to_first <= to_second) | (index == first)) & (index != second), 1.0, 0.0)
        near = tl.where(same, distance, 0.0)
        size = tl.sum(same.to(tl.float32), 1)
        count = _over_node(same, goes)
        step = 0
        moving = 1
        while (step < iterations) & (moving > 0):
            lefts = tl.maximum(count, 1.0)
            rights = tl.maximum(size - count, 1.0)
            mean_left = tl.sum(near * goes[None, :], 1) / lefts
            mean_right = tl.sum(near * (1.0 - goes)[None, :], 1) / rights
            to_left = mean_left - 0.5 * _over_node(same, goes * mean_left) / lefts
            to_right = mean_right - 0.5 * _over_node(same, (1.0 - goes) * mean_right) / rights
            wanted = tl.where(to_left <= to_right, 1.0, 0.0)
            many = _over_node(same, wanted)
            valid = (many > 0.0) & (many < size)
            moved = tl.where(valid, wanted, goes)
            moving = tl.max((moved != goes).to(tl.int32), 0)
            count = tl.where(valid, many, count)
            goes = moved
            step += 1
        at = (client * nodes + node) * K + index
        tl.store(left + at, goes, mask=node >= 0)
        tl.store(right + at, 1.0 - goes, mask=node >= 0)
        side = 2 * node + (goes == 0.0).to(tl.int32)
        beside = (side[:, None] == side[None, :]) & (node[:, None] >= 0)
        more = tl.sum(beside.to(tl.int32), 1) >= 2
        speaks = (more & (tl.min(tl.where(beside, column, BLOCK), 1) == index)).to(tl.int32)
        before = tl.sum(tl.where(side[None, :] < side[:, None], speaks[None, :], 0), 1)
        node = tl.where(more, tail + before, -1)
        tail += tl.sum(speaks, 0)


def class_tree(square: Tensor, present: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Return trees (C, J, K) twice from squared distances (C, K, K) and present classes (C, K)."""
    clients, K = present.shape
    left = torch.zeros(clients, max(K - 1, 1), K, device=square.device)
    right = torch.zeros_like(left)
    block = max(triton.next_power_of_2(K), 16)
    if clients:
        _class_tree[(clients,)](
            square.contiguous(), present.contiguous(), left, right, left.shape[1], K, iterations, BLOCK=block,
            num_warps=max(1, block // 8),
        )  # fmt: skip
    return left, right
