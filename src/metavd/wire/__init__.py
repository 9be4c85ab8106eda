"""Parameters on the wire: how many bytes they take, the container they travel in, what a server checks of an answer."""

from .codec import decode, encode
from .count import Traffic, sparsity, together, traffic
from .guard import Expected, Guard, Limits, Rejected, Reply

__all__ = [
    "Expected",
    "Guard",
    "Limits",
    "Rejected",
    "Reply",
    "Traffic",
    "decode",
    "encode",
    "sparsity",
    "together",
    "traffic",
]
