"""Memory that kernels of a rank have to themselves, from the first step to the last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from costmodel.cache import CostCache
from costmodel.execution.execution import BF16_BYTES
from costmodel.memory.block.graph_bytes import graph_bytes
from costmodel.memory.block.placed_block import PlacedBlock
from planner.language.graph import Program
from planner.language.lowering.experts import grouped_products
from planner.language.ops.record import packet_of, why_no_graph
from planner.units import KIB, MIB

HOPPER = re.compile(r"\bG?H\d")
"""Names of devices of that generation."""

LARGE_WORKSPACE_BYTES = 32 * MIB
"""Of a stream of a layer's products since Hopper (Transformer Engine, pytorch/module/base.py:
get_cublas_workspace_size_bytes); of torch's own on Hopper, and where products are deterministic
(CUBLAS_WORKSPACE_CONFIG=:4096:8)."""

LAYER_WORKSPACE_BYTES, PRODUCT_WORKSPACE_BYTES = 4 * MIB, 8 * MIB + 128 * KIB
"""The same elsewhere (torch: aten/src/ATen/cuda/CublasHandlePool.cpp, ``:4096:2:16:8``)."""


def workspace_bytes(costs: CostCache, blocks: Sequence[PlacedBlock]) -> int:
    """Return the bytes of a rank's workspaces of matrix products, of the buffer of scores of its
    attention, and of CUDA graphs; `blocks` are those of all its stages.
    """
    cluster, execution = costs.profile.cluster, costs.execution
    programs = {id(block.kind): block.kind.bytes.saved.program for block in blocks}.values()
    of_layers = execution.layer_workspaces
    if any(grouped_products(program) for program in programs):
        of_layers += execution.grouped_streams
    # What multiplies in 8 bits is Hopper or newer.
    is_new = "float8_e4m3fn" in dict(cluster.peak_flop_per_s)
    of_layer = LARGE_WORKSPACE_BYTES if is_new else LAYER_WORKSPACE_BYTES
    is_large = execution.deterministic or HOPPER.search(cluster.device) is not None
    of_product = LARGE_WORKSPACE_BYTES if is_large else PRODUCT_WORKSPACE_BYTES
    graphs = _of_graphs(blocks) if execution.graphs else 0
    scores = max(map(_scores_bytes, programs), default=0) if execution.scores_stay else 0
    return of_layers * of_layer + execution.product_workspaces * of_product + scores + graphs


def _of_graphs(blocks: Sequence[PlacedBlock]) -> int:
    """Return the bytes of CUDA graphs of compiled blocks: what each class's take and give, and what
    they hold while they run: a pool, and as much that the runs ahead of captures leave on their
    stream.
    """
    kinds = {id(block.kind.bytes.saved): block.kind.bytes for block in blocks}.values()
    held = [kind for kind in kinds if why_no_graph(kind.saved.program) is None]
    stay = sum(graph_bytes(kind.saved.program, kind.saved).total for kind in held)
    rises = [max(k.forward_rise_bytes, k.backward(first=False).rise_bytes) for k in held]
    return stay + 2 * max(rises, default=0)


def _scores_bytes(program: Program) -> int:
    """Return the bytes of attention's scores (samples, heads, queries, keys) in 16 bits, where they
    are written out.
    """
    scores = (program.tensor[o.inputs[0]] for o in program.ops if packet_of(o.target) == "softmax")
    shapes = (meta.shape_at(1) for meta in scores if len(meta.shape) == 4)
    return max((BF16_BYTES * prod(shape) for shape in shapes), default=0)
