"""The usual layouts of a template's blocks: on tp as Megatron-LM has them, on cp by positions.

A template's tapes note how each tensor lies on tp (`tape`), so nothing is searched.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from planner.language.graph import Affine, TensorMeta
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import Own
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.lowering import lower
from planner.language.ops.families.entries.routing import SORT_ROWS
from planner.language.ops.record import op_inside
from planner.language.templates.build import BlockClass, template_of
from planner.language.templates.tape import ROWS, STREAM, placed
from planner.language.templates.transformer import Transformer


@lru_cache(maxsize=1024)
def tp_layouts(
    model: Transformer,
    *,
    sequence_parallel: bool,
    microbatch_size: int = 1,
    cuts_experts: bool = True,
) -> tuple[ClassLayout, ...]:
    """Return the layouts of a model's classes on tp.

    With `sequence_parallel` what goes from layer to layer is split by positions, so that sums over
    tp become a reduce-scatter before it and an all-gather after it. Experts' rows are those of a
    microbatch of `microbatch_size` samples; `cuts_experts` says whether each tp rank has a part of
    every expert's matrices, or whole ones for the rows of its own.
    """

    def filled(text: str) -> str:
        stream, rows = _stream(sequence_parallel, microbatch_size)
        return placed(text, stream=stream, rows=rows, cuts_experts=cuts_experts)

    return tuple(
        ClassLayout(
            class_index=index,
            axis="tp",
            inputs=tuple(map(filled, of.places[0])),
            params=tuple(map(filled, of.places[1])),
            outputs=tuple(map(filled, of.places[2])),
            ops=tuple((name, filled(text)) for name, text in of.shardings),
        )
        for index, of in enumerate(template_of(model).classes)
    )


def _stream(sequence_parallel: bool, microbatch_size: int) -> tuple[str, str]:
    """Return how what goes from layer to layer lies on tp, and how its rows do."""
    if not sequence_parallel:
        return "R", "R"
    return "S(1)", "S(0)" if microbatch_size == 1 else f"S(0)x{microbatch_size}"


@lru_cache(maxsize=1024)
def cp_layouts(
    model: Transformer,
    *,
    tp: int,
    sequence_parallel: bool,
    microbatch_size: int,
    cuts_experts: bool = True,
) -> tuple[ClassLayout, ...]:
    """Return the layouts of a model's classes on cp, as lowered on tp before.

    Every tensor is split along its sequence, which is the dim that grows with the length of a
    sample; attention alone takes keys and values whole.
    """
    template, longer = template_of(model), template_of(replace(model, seq_len=2 * model.seq_len))
    on_tp = tp_layouts(
        model,
        sequence_parallel=sequence_parallel,
        microbatch_size=microbatch_size,
        cuts_experts=cuts_experts,
    )
    streams = _stream(sequence_parallel, microbatch_size)
    found = []
    # Where tp splits sequences, too, its pieces come first: whole tensors are rows of tp of them.
    pieces = tp if sequence_parallel else 1
    for index, of in enumerate(template.classes):
        program = of.program
        is_stream = _streams(of, cuts_experts=cuts_experts)
        along = {
            # A table of positions is as long as a sample, and each rank has it whole.
            meta.name: None if meta.name in program.params else _sequence_dim(meta, other)
            for meta, other in zip(
                program.tensors, longer.graph.classes[index].tensors, strict=True
            )
        }

        def split(
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

        place = {name: split(name, 1 if name in is_stream else pieces) for name in along}
        bound = program.bind(microbatch_size)
        local = lower(bound, on_tp[index] if tp > 1 else None, axis="tp", axis_size=tp)
        ops = []
        for op in local.ops:
            takes = [place[name] for name in op.inputs]
            if op.target == REDISTRIBUTE:
                source = op.inputs[0]
                along[op.outputs[0]] = along[source]
                to_stream = op.args[3] in streams
                place[op.outputs[0]] = split(op.outputs[0], 1 if to_stream else pieces)
                if place[source].startswith("O"):  # ends of runs, of the rows beside them
                    place[op.outputs[0]] = str(Own(segments=pieces * microbatch_size))
            elif op_inside(op).target == ATTENTION:
                takes[1:3] = "R", "R"
            elif op.target == SORT_ROWS:
                sorted_rows, order, ends = op.outputs
                place[order] = place[sorted_rows].replace("S", "O")
                place[ends] = place[order].replace("(0)", "")
            elif "cross_entropy" in op.target or set(takes) == {"P"}:
                # A loss of a rank's own positions is a term of a sum, and so is a sum of losses.
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


def _streams(of: BlockClass, *, cuts_experts: bool) -> set[str]:
    """Names of the tensors that lie on tp as what goes from layer to layer, or as its rows."""

    def is_stream(text: str) -> bool:
        return placed(text, stream=STREAM, rows=ROWS, cuts_experts=cuts_experts) in (STREAM, ROWS)

    program = of.program
    found = {n for n, place in zip(program.inputs, of.places[0], strict=True) if is_stream(place)}
    leaving = {name: text.rpartition("->")[2].split(",") for name, text in of.shardings}
    for op in program.ops:
        places = zip(op.outputs, leaving[op.name], strict=True)
        found |= {name for name, place in places if is_stream(place)}
    return found


def _sequence_dim(meta: TensorMeta, longer: TensorMeta) -> tuple[int, bool] | None:
    """Return the dim that grows with a sample's length, and whether it is of all samples' tokens;
    None where a tensor has no such dim.
    """
    for dim, (size, other) in enumerate(zip(meta.shape, longer.shape, strict=True)):
        if size != other:
            return dim, isinstance(size, Affine)
    return None
