"""The usual layouts of a template's blocks: on tp as Megatron-LM has them, on cp by positions.

A template's tapes note how each tensor lies on tp (`tape`), so nothing is searched.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from planner.graph import Affine, TensorMeta
from planner.layout.class_layout import ClassLayout
from planner.layout.lowering import lower
from planner.layout.redistribute import REDISTRIBUTE
from planner.templates.build import BlockClass, template_of
from planner.templates.tape import STREAM
from planner.templates.transformer import Transformer


@lru_cache(maxsize=1024)
def tp_layouts(model: Transformer, *, sequence_parallel: bool) -> tuple[ClassLayout, ...]:
    """Return the layouts of a model's classes on tp.

    With `sequence_parallel` what goes from layer to layer is split by positions, so that sums over
    tp become a reduce-scatter before it and an all-gather after it.
    """
    stream = "S(1)" if sequence_parallel else "R"

    def placed(text: str) -> str:
        return text.replace(STREAM, stream)

    return tuple(
        ClassLayout(
            class_index=index,
            axis="tp",
            inputs=tuple(map(placed, of.places[0])),
            params=tuple(map(placed, of.places[1])),
            outputs=tuple(map(placed, of.places[2])),
            ops=tuple((name, placed(text)) for name, text in of.shardings),
        )
        for index, of in enumerate(template_of(model).classes)
    )


@lru_cache(maxsize=1024)
def cp_layouts(
    model: Transformer, *, tp: int, sequence_parallel: bool, microbatch_size: int
) -> tuple[ClassLayout, ...]:
    """Return the layouts of a model's classes on cp, as lowered on tp before.

    Every tensor is split along its sequence, which is the dim that grows with the length of a
    sample; attention alone takes keys and values whole.
    """
    template, longer = template_of(model), template_of(replace(model, seq_len=2 * model.seq_len))
    on_tp = tp_layouts(model, sequence_parallel=sequence_parallel)
    found = []
    # Where tp splits sequences, too, its pieces come first: whole tensors are rows of tp of them.
    pieces = tp if sequence_parallel else 1
    for index, of in enumerate(template.classes):
        program = of.program
        is_stream = _streams(of)
        along = {
            meta.name: _sequence_dim(meta, other)
            for meta, other in zip(
                program.tensors, longer.graph.classes[index].tensors, strict=True
            )
        }

        def placed(
            name: str,
            pieces: int,
            along: dict[str, tuple[int, bool] | None] = along,
        ) -> str:
            found = along[name]
            if found is None:
                return "R"
            dim, is_rows = found
            segments = pieces * (microbatch_size if is_rows else 1)
            return f"S({dim})x{segments}" if segments > 1 else f"S({dim})"

        place = {name: placed(name, 1 if name in is_stream else pieces) for name in along}
        bound = program.bind(microbatch_size)
        local = lower(bound, on_tp[index] if tp > 1 else None, axis="tp", axis_size=tp)
        ops = []
        for op in local.ops:
            takes = [place[name] for name in op.inputs]
            if op.target == REDISTRIBUTE:
                source = op.inputs[0]
                along[op.outputs[0]] = along[source]
                to_stream = op.args[3] == "S(1)"
                place[op.outputs[0]] = placed(op.outputs[0], 1 if to_stream else pieces)
            elif op.target == ATTENTION:
                takes[1:3] = "R", "R"
            elif "cross_entropy" in op.target:
                place[op.outputs[0]] = "P"
            leaves = [place[name] for name in op.outputs]
            ops.append((op.name, ",".join(takes) + "->" + ",".join(leaves)))
        found.append(
            ClassLayout(
                class_index=index,
                axis="cp",
                inputs=tuple(place[name] for name in program.inputs),
                params=("R",) * len(program.params),
                outputs=tuple(place[name].replace("P", "R") for name in local.outputs),
                ops=tuple(ops),
            )
        )
    return tuple(found)


ATTENTION = "aten.scaled_dot_product_attention.default"


def _streams(of: BlockClass) -> set[str]:
    """Names of the tensors that lie on tp as what goes from layer to layer."""
    program = of.program
    found = {n for n, place in zip(program.inputs, of.places[0], strict=True) if place == STREAM}
    leaving = {name: text.rpartition("->")[2].split(",") for name, text in of.shardings}
    for op in program.ops:
        places = zip(op.outputs, leaving[op.name], strict=True)
        found |= {name for name, place in places if place == STREAM}
    return found


def _sequence_dim(meta: TensorMeta, longer: TensorMeta) -> tuple[int, bool] | None:
    """Return the dim that grows with a sample's length, and whether it is of all samples' tokens;
    None where a tensor has no such dim.
    """
    for dim, (size, other) in enumerate(zip(meta.shape, longer.shape, strict=True)):
        if size != other:
            return dim, isinstance(size, Affine)
    return None
