"""Other shapes that the batches of a plan may have: its buckets.

A plan is searched, and its memory counted, for the shapes of its model's `inputs`. A bucket is
the same model on a batch that is smaller in some dims, sequences of 128 for 512. Block for block
it does the same with other sizes, so the plan's stages and layouts are those of every bucket, and
one set of weights serves all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.errors import ModelError, PlanError
from planner.language.plan.parts import Bucket, InputSpec, ModelRef, batch_spec
from planner.language.plan.plan import Plan

if TYPE_CHECKING:
    from planner.language.graph import ModelGraph, Program


def with_buckets(plan: Plan, graph: ModelGraph, others: Sequence[ModelGraph]) -> Plan:
    """Return a plan whose batches may have the shapes of other captures of its model, too.

    The smallest is first; one of the plan's own shapes adds nothing. Raises ModelError for a
    capture that does something else, or takes a larger batch.
    """
    buckets = {}
    for other in others:
        check_bucket(graph, other)
        spec = batch_spec(other)
        if spec != plan.model.inputs:
            buckets[spec] = Bucket(inputs=spec, fingerprint=other.fingerprint)
    ordered = tuple(buckets[spec] for spec in sorted(buckets, key=_entries))
    model = ModelRef.model_validate({**dict(plan.model), "buckets": ordered})
    return plan.model_copy(update={"model": model})


def validate_bucket(bucket: Bucket, graph: ModelGraph, other: ModelGraph) -> None:
    """Raise PlanError where a capture is not that of a bucket, ModelError as `check_bucket`."""
    if bucket.fingerprint != other.fingerprint:
        raise PlanError(
            f"the plan's bucket of {shapes_of(bucket.inputs)} is of another model "
            f"({bucket.fingerprint[:12]}, not {other.fingerprint[:12]}); search again"
        )
    check_bucket(graph, other)


def check_bucket(graph: ModelGraph, other: ModelGraph) -> None:
    """Raise ModelError where two captures of a model differ in more than sizes of activations."""
    shapes = shapes_of(batch_spec(other))
    for (path, _, shape), (_, _, largest) in zip(
        batch_spec(other), batch_spec(graph), strict=False
    ):
        for size, most in zip(shape, largest, strict=False):
            if isinstance(size, int) and isinstance(most, int) and size > most:
                raise ModelError(
                    f"batch tensor {path} has {size} entries in a bucket and {most} in the plan's "
                    "own shapes, which are the largest; let batch(size) alone give the largest"
                )
    if _outline(graph) != _outline(other):
        raise ModelError(
            f"on a batch of {shapes} the model is not cut into the blocks of {graph.name}; a "
            "forward does the same ops for every shape, or its shapes need plans of their own"
        )
    held = {t.name: t for t in graph.tensors if t.kind not in ("activation", "input")}
    for tensor in other.tensors:
        if tensor.kind not in ("activation", "input") and held.get(tensor.name) != tensor:
            raise ModelError(
                f"{tensor.fqn or tensor.name} is another on a batch of {shapes}; what a forward "
                "holds may not depend on the shape of its batch"
            )
    for own, others in zip(graph.classes, other.classes, strict=True):
        if _ops(own) != _ops(others):
            raise ModelError(
                f"block class {own.name} runs other ops on a batch of {shapes}; a forward does the "
                "same for every shape"
            )


def _outline(graph: ModelGraph) -> object:
    blocks = tuple((b.name, b.class_index, b.inputs, b.params, b.outputs) for b in graph.blocks)
    # (As JSON: graphs that were kept have tuples for lists.)
    tree = json.dumps(graph.batch_tree)
    return blocks, graph.batch_inputs, tree, graph.preamble.params, graph.loss, graph.unit


def _ops(program: Program) -> object:
    ops = tuple((op.name, op.target, op.inputs, op.outputs) for op in program.ops)
    tensors = {(t.name, t.dtype, t.requires_grad, len(t.shape)) for t in program.tensors}
    return ops, program.inputs, program.params, program.outputs, tensors


def _entries(spec: InputSpec) -> int:
    """Entries of one sample, which order buckets by size."""
    total = 0
    for _, _, shape in spec:
        entries = 1
        for size in shape:
            entries *= size if isinstance(size, int) else sum(size)
        total += entries
    return total


def shapes_of(spec: InputSpec) -> str:
    """Return the shapes of a batch's tensors in words, n for what grows with its samples."""
    shapes = (
        f"{path} [{', '.join('n' if not isinstance(s, int) else str(s) for s in shape)}]"
        for path, _, shape in spec
    )
    return ", ".join(shapes)
