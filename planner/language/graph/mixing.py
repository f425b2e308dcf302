"""How an op may compute across the samples of a batch, by name."""

from __future__ import annotations

from typing import Literal

Kind = Literal["mixed", "pairs", "normaliser", "size", "buffer", "repeated", "unknown"]
"""How an op computes across samples: its result mixes samples ("mixed"), has an entry for each pair
of them ("pairs"), divides by a sum over the batch that parameters reach ("normaliser"), holds their
number as a value ("size"); it writes what samples made to a buffer ("buffer"), or moves a buffer in
every microbatch ("repeated"); or the op has no rule ("unknown")."""
