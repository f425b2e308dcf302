"""What each op is: how it may be sharded, what it costs, what it does again in a backward.

In: one op with its shapes (`call`). Out: its strategies on a mesh axis (`registry`), its flop and
bytes (`flops`), and whether it is cheap to recompute (`recompute_choice`). Each op family has one
file of rules in `families`; importing this package registers them. All of it works on the graph
alone, free of torch, so a search can run where torch is not installed.
"""

from __future__ import annotations

from planner.ops import nested  # noqa: F401 - importing registers its rules
from planner.ops.families import (  # noqa: F401 - importing a family registers its rules
    attention,
    convolution,
    creation,
    embedding,
    indexing,
    loss,
    matmul,
    normalization,
    pointwise,
    reductions,
    views,
)
