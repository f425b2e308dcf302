"""The captured model as plain data, free of torch.

In: a captured list of ops (`planner.capture`). Out: a `ModelGraph`, whose sizes are affine in the
microbatch size, cut into a preamble and a chain of blocks grouped by class. Read `model_graph`
first; `batch`, `batch_split` and `unit` describe batches.
"""

from planner.language.graph.model_graph import (
    SAMPLES,
    Affine,
    Arg,
    Block,
    ModelGraph,
    Op,
    Program,
    Ref,
    Size,
    Symbol,
    TensorMeta,
    WholeBatch,
    bind_arg,
    from_json,
    iter_refs,
    map_refs,
    size_at,
    to_json,
    written_buffers,
)
from planner.language.graph.unit import SAMPLE, Unit

__all__ = [
    "SAMPLE",
    "SAMPLES",
    "Affine",
    "Arg",
    "Block",
    "ModelGraph",
    "Op",
    "Program",
    "Ref",
    "Size",
    "Symbol",
    "TensorMeta",
    "Unit",
    "WholeBatch",
    "bind_arg",
    "from_json",
    "iter_refs",
    "map_refs",
    "size_at",
    "to_json",
    "written_buffers",
]
