"""Operators with more than one implementation: plain torch, and a kernel on a GPU."""
