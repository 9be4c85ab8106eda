"""How products are computed; sums are always in float32."""

from __future__ import annotations

EXACT, TF32, BF16 = "exact", "tf32", "bf16"
PRECISIONS = (EXACT, TF32, BF16)
"""In float32, in float32 with 10 bits of mantissa, in bfloat16."""
