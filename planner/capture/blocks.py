"""Cutting a captured list of ops into a preamble and a chain of blocks, and grouping equals.

A *unit* is a child of a module list (``layers.3`` in ``model.layers.3.mlp.up``): one
transformer layer, one residual block. Ops run in order, so the ops of a unit are a run;
what lies between units joins the run before it, unless it has parameters of its own (an
embedding, a final norm with the head), which then makes a block of its own. A model
without lists is cut at its top-level children that hold parameters.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise, takewhile
from typing import Any

from planner.errors import CaptureError
from planner.language.graph import (
    Block,
    ModelGraph,
    Op,
    Program,
    Ref,
    TensorMeta,
    written_buffers,
)
from planner.language.ops.record import is_random, mutates


@dataclass(frozen=True, slots=True, kw_only=True)
class RawOp:
    """An op as captured, with the qualified name of the module that called it."""

    op: Op
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGraph:
    """A whole model as one list of ops; `inputs` are the batch's tensors in order."""

    tensors: dict[str, TensorMeta]
    inputs: tuple[str, ...]
    ops: tuple[RawOp, ...]
    loss: str


def build_graph(raw: RawGraph, *, name: str, batch_tree: Any) -> ModelGraph:
    """Cut, classify and assemble. Raise CaptureError when nothing is left to train."""
    ops = live_ops(raw)
    if not any(raw.tensors[n].kind == "param" for item in ops for n in item.op.inputs):
        raise CaptureError(f"the loss of {name} uses no parameter; there is nothing to train")
    segments = _segments(ops, raw)
    preamble_ops, segments = _hoist(segments, raw)
    blocks, classes, boundary = _classify(segments, preamble_ops, raw)
    _refuse_shared_writes(blocks, classes, raw)
    preamble_ops = _in_order_of_use(preamble_ops, blocks)
    held = _held_in_order(raw, preamble_ops, blocks)
    names = _names_by_order(raw, held, preamble_ops, blocks)

    def renamed(old: Iterable[str]) -> tuple[str, ...]:
        return tuple(names[n] for n in old)

    return ModelGraph(
        name=name,
        tensors=tuple(
            replace(raw.tensors[n], name=names[n]) for n in (*raw.inputs, *held, *boundary)
        ),
        batch_inputs=renamed(raw.inputs),
        batch_tree=batch_tree,
        preamble=_preamble(preamble_ops, raw, blocks, held, names),
        blocks=tuple(
            replace(
                block,
                inputs=renamed(block.inputs),
                params=renamed(block.params),
                outputs=renamed(block.outputs),
            )
            for block in blocks
        ),
        classes=classes,
        loss=names[raw.loss],
    )


def live_ops(raw: RawGraph) -> list[RawOp]:
    """Return the ops that the loss follows from, and those that write to a buffer."""
    needed = {raw.loss}
    live = []
    for item in reversed(raw.ops):
        if needed.intersection(item.op.outputs) or mutates(item.op):
            live.append(item)
            needed.update(item.op.inputs)
    return live[::-1]


def _refuse_shared_writes(
    blocks: tuple[Block, ...], classes: tuple[Program, ...], raw: RawGraph
) -> None:
    """Refuse a buffer that is written in a block and used in another: they may be apart."""
    users: dict[str, list[Block]] = {}
    for block in blocks:
        for name in dict.fromkeys(block.params):
            users.setdefault(name, []).append(block)
    for block in blocks:
        program = classes[block.class_index]
        names = dict(zip(program.params, block.params, strict=True))
        for own in written_buffers(program):
            others = [user.name for user in users[names[own]] if user is not block]
            if others:
                raise CaptureError(
                    f"buffer {raw.tensors[names[own]].fqn} is written in block {block.name} and "
                    f"used in block {others[0]}, which a plan may put on another device; give "
                    "each block a buffer of its own"
                )


# ---------------------------------------------------------------------------------------
# Cutting


@dataclass(slots=True)
class _Segment:
    """A run of ops on the way to becoming a block; mutable while ops are gathered.

    `glue` counts the trailing ops that come from around the unit, not from inside it.
    """

    unit: str
    ops: list[RawOp]
    glue: int = 0


def _unit_of(path: str) -> str | None:
    """``a.layers.3.mlp`` → ``a.layers.3``; directly nested lists count as one."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            end = index + 1
            while end < len(parts) and parts[end].isdigit():
                end += 1
            return ".".join(parts[:end])
    return None


def _segments(ops: list[RawOp], raw: RawGraph) -> list[_Segment]:
    owners = {
        fqn.rpartition(".")[0]
        for t in raw.tensors.values()
        if t.kind == "param"
        for fqn in (t.fqn, *t.aliases)
    }
    units = [_unit_of(item.module) for item in ops]
    if not any(units):
        units = _children(ops, owners)
    above = {
        unit[:i] for unit in set(units) if unit for i, c in enumerate(unit + ".") if c == "."
    } - set(units) | {""}

    def starts_own(item: RawOp) -> bool:
        if any(raw.tensors[n].kind == "param" for n in item.op.inputs):
            return True
        return item.module in owners and item.module not in above

    segments: list[_Segment] = []
    for item, unit in zip(ops, units, strict=True):
        last = segments[-1] if segments else None
        if unit is not None:
            if last is None or last.unit != unit:
                segments.append(_Segment(unit, [item]))
            else:
                last.ops.append(item)
        elif last is None or (not last.unit.startswith("~") and starts_own(item)):
            segments.append(_Segment(f"~{item.module}", [item]))
        else:
            last.ops.append(item)
            last.glue += unit is None and not last.unit.startswith("~")
    _even_out(segments)
    return _merge_bare(segments, raw)


def _even_out(segments: list[_Segment]) -> None:
    """Give the last unit of a list only the glue that its siblings have.

    A residual add between layers belongs to each layer; a pooling after the last one
    belongs to what follows, so that all layers stay one class.
    """

    def siblings(first: _Segment, second: _Segment) -> bool:
        return (
            first.unit != second.unit
            and first.unit.rpartition(".")[0] == second.unit.rpartition(".")[0]
        )

    usual: dict[str, list[str]] = {}
    for segment, following in pairwise(segments):
        if segment.unit.startswith("~"):
            continue
        split = len(segment.ops) - segment.glue
        glue = [item.op.target for item in segment.ops[split:]]
        known = usual.setdefault(segment.unit.rpartition(".")[0], glue)
        if siblings(segment, following) or glue == known:
            continue
        same = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(glue, known, strict=False)))
        following.ops[:0] = segment.ops[split + same :]
        del segment.ops[split + same :]
        segment.glue = same


def _children(ops: list[RawOp], owners: set[str]) -> list[str | None]:
    """Units of a model without module lists: children, at the first level with several."""
    prefix = ""
    while True:
        depth = len(prefix)
        heads = {o[depth:].split(".")[0] for o in owners if o.startswith(prefix) and o[depth:]}
        if len(heads) != 1:
            break
        (only,) = heads
        if prefix + only in owners:
            break
        prefix += only + "."
    result: list[str | None] = []
    for item in ops:
        rest = item.module[len(prefix) :] if item.module.startswith(prefix) else ""
        unit = prefix + rest.split(".")[0] if rest else None
        held = unit is not None and any(o == unit or o.startswith(unit + ".") for o in owners)
        result.append(unit if held else None)
    return result


def _merge_bare(segments: list[_Segment], raw: RawGraph) -> list[_Segment]:
    """Join segments without trainable parameters to their neighbour before (or after, first)."""

    def bare(segment: _Segment) -> bool:
        return not any(
            raw.tensors[n].kind == "param" for item in segment.ops for n in item.op.inputs
        )

    merged: list[_Segment] = []
    for segment in segments:
        if merged and (bare(segment) or (len(merged) == 1 and bare(merged[0]))):
            unit = merged[-1].unit if bare(segment) else segment.unit
            merged[-1] = _Segment(unit, merged[-1].ops + segment.ops)
        else:
            merged.append(segment)
    return merged


def _hoist(segments: list[_Segment], raw: RawGraph) -> tuple[list[RawOp], list[_Segment]]:
    """Move parameter-free values that several blocks use into the preamble.

    They come from the batch and from buffers nobody writes; every stage computes those it
    needs instead of receiving them.
    """
    written = {
        n
        for s in segments
        for item in s.ops
        if mutates(item.op)
        for n in item.op.inputs
        if raw.tensors[n].kind == "buffer"
    }
    impure = written | {n for n, t in raw.tensors.items() if t.kind == "param"}
    home: dict[str, int] = {}
    maker: dict[str, RawOp] = {}
    wanted: set[str] = set()
    for index, segment in enumerate(segments):
        for item in segment.ops:
            op = item.op
            if is_random(op) or mutates(op) or impure.intersection(op.inputs):
                impure.update(op.outputs)
            for n in op.outputs:
                home[n], maker[n] = index, item
            wanted.update(n for n in op.inputs if n not in impure and home.get(n, index) != index)
    hoisted: set[str] = set()
    queue = list(wanted)
    while queue:
        n = queue.pop()
        if n in maker and maker[n].op.name not in hoisted:
            hoisted.add(maker[n].op.name)
            queue.extend(maker[n].op.inputs)
    preamble = [i for s in segments for i in s.ops if i.op.name in hoisted]
    left = [_Segment(s.unit, [i for i in s.ops if i.op.name not in hoisted]) for s in segments]
    return preamble, [s for s in left if s.ops]


def _preamble(
    ops: list[RawOp],
    raw: RawGraph,
    blocks: tuple[Block, ...],
    held: tuple[str, ...],
    names: dict[str, str],
) -> Program:
    produced = [n for item in ops for n in item.op.outputs]
    used = {n for block in blocks for n in block.inputs}
    consumed = {n for item in ops for n in item.op.inputs} - set(produced)
    inputs = tuple(n for n in raw.inputs if n in consumed)
    params = tuple(n for n in held if n in consumed)
    return Program(
        name="preamble",
        inputs=tuple(names[n] for n in inputs),
        params=tuple(names[n] for n in params),
        outputs=tuple(names[n] for n in produced if n in used),
        tensors=tuple(
            replace(raw.tensors[n], name=names[n]) for n in (*inputs, *params, *produced)
        ),
        ops=tuple(
            replace(
                item.op.rename(names.__getitem__),
                name=names[item.op.outputs[0]].replace(".", "_"),
            )
            for item in ops
        ),
    )


# ---------------------------------------------------------------------------------------
# Order and names. A forward that loops over a set (Hugging Face models make the rotary tables
# of each kind of layer so) traces its ops, its buffers and so its names in another order from
# one process to the next. What the order does not matter to is put in the order of its use.


def _in_order_of_use(ops: list[RawOp], blocks: tuple[Block, ...]) -> list[RawOp]:
    """Sort the preamble: each op right before the first that needs it, blocks in their order."""
    maker = {n: item for item in ops for n in item.op.outputs}
    done: dict[str, RawOp] = {}
    for wanted in (n for block in blocks for n in block.inputs if n in maker):
        waiting = [maker[wanted]]
        while waiting:
            item = waiting[-1]
            missing = [
                maker[n] for n in item.op.inputs if n in maker and maker[n].op.name not in done
            ]
            if missing:
                waiting.append(missing[0])
            else:
                done[waiting.pop().op.name] = item
    return list(done.values())


def _held_in_order(
    raw: RawGraph, preamble: list[RawOp], blocks: tuple[Block, ...]
) -> tuple[str, ...]:
    """Parameters as the module lists them, then buffers and constants by their first use.

    Constants that forward made, and that no op of the graph reads, are left out.
    """
    used = [n for item in preamble for n in item.op.inputs]
    used += [n for block in blocks for n in block.params]
    first = {n: index for index, n in reversed(list(enumerate(used)))}
    params = [n for n, t in raw.tensors.items() if t.kind == "param"]
    others = [
        n
        for n, t in raw.tensors.items()
        if t.kind in ("buffer", "constant") and (n in first or t.fqn)
    ]
    others.sort(key=lambda n: (first.get(n, len(used)), raw.tensors[n].fqn))
    return (*params, *others)


def _names_by_order(
    raw: RawGraph, held: tuple[str, ...], preamble: list[RawOp], blocks: tuple[Block, ...]
) -> dict[str, str]:
    """Name what the graph makes after its op, and constants, numbered in the graph's order."""
    nameless = {n for n in held if not raw.tensors[n].fqn}
    names = {n: n for n in (*raw.inputs, *held) if n not in nameless}
    maker = {n: item.op for item in raw.ops for n in item.op.outputs}
    made = [n for item in preamble for n in item.op.outputs]
    made += [n for block in blocks for n in block.outputs]
    counts: dict[str, int] = {}
    taken = set(names.values())
    for n in (*(n for n in held if n in nameless), *made):
        base = maker[n].target.split(".")[1] if n in maker else "constant"
        name = ""
        while not name or name in taken:
            serial = counts[base] = counts.get(base, 0) + 1
            name = base if serial == 1 else f"{base}_{serial}"
        names[n] = name
        taken.add(name)
    return names


# ---------------------------------------------------------------------------------------
# Classes


def _classify(
    segments: list[_Segment], preamble: list[RawOp], raw: RawGraph
) -> tuple[tuple[Block, ...], tuple[Program, ...], tuple[str, ...]]:
    home = {n: i for i, s in enumerate(segments) for item in s.ops for n in item.op.outputs}
    crossing = {
        n
        for index, segment in enumerate(segments)
        for item in segment.ops
        for n in item.op.inputs
        if home.get(n, index) != index
    } | {raw.loss}
    from_preamble = {n for item in preamble for n in item.op.outputs}
    classes: dict[Hashable, int] = {}
    programs: list[Program] = []
    blocks = []
    boundary: dict[str, None] = {}
    for index, segment in enumerate(segments):
        roles = _Roles.of(segment, crossing, raw)
        key = _told(segment, roles, raw)
        if key not in classes:  # equal segments, of which there may be thousands, are told alone
            classes[key] = len(programs)
            programs.append(_canonical(segment, roles, raw))
        block = Block(
            index=index,
            name=segment.unit.removeprefix("~") or "root",
            class_index=classes[key],
            inputs=roles.inputs,
            params=roles.params,
            outputs=roles.outputs,
        )
        blocks.append(block)
        boundary.update(dict.fromkeys(n for n in block.inputs if n in from_preamble))
        boundary.update(dict.fromkeys(block.outputs))
    return tuple(blocks), tuple(programs), tuple(boundary)


@dataclass(frozen=True, slots=True)
class _Roles:
    """The tensors of a segment by their roles, and their names by role and order.

    `bases` are the names of its ops.
    """

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    names: dict[str, str]
    bases: tuple[str, ...]

    @classmethod
    def of(cls, segment: _Segment, crossing: set[str], raw: RawGraph) -> _Roles:
        names: dict[str, str] = {}
        inputs: list[str] = []
        params: list[str] = []
        outputs: list[str] = []
        bases: list[str] = []
        counts: dict[str, int] = {}
        for item in segment.ops:
            for n in item.op.inputs:
                if n in names:
                    continue
                if raw.tensors[n].kind in ("param", "buffer", "constant"):
                    names[n] = f"p{len(params)}"
                    params.append(n)
                else:
                    names[n] = f"in{len(inputs)}"
                    inputs.append(n)
            packet = item.op.target.split(".")[1]
            serial = counts[packet] = counts.get(packet, 0) + 1
            base = packet if serial == 1 else f"{packet}_{serial}"
            bases.append(base)
            for position, n in enumerate(item.op.outputs):
                names[n] = f"{base}.{position}" if len(item.op.outputs) > 1 else base
            outputs += [n for n in item.op.outputs if n in crossing]
        return cls(tuple(inputs), tuple(params), tuple(outputs), names, tuple(bases))


def _told(segment: _Segment, roles: _Roles, raw: RawGraph) -> Hashable:
    """Return what makes segments one class: all of `_canonical` but where the user's code stands.

    Numbers are told with their types: 1, 1.0 and True are three things to an op.
    """
    names, unit, held = roles.names, segment.unit, set(roles.params)

    def told(arg: Any) -> Hashable:
        kind = type(arg)
        if kind is Ref:
            return kind, names[arg.name]
        if kind is tuple:
            return tuple(map(told, arg))
        return kind, repr(arg) if kind is float else arg

    ops = tuple(
        (op.target, told(op.args), told(op.kwargs), len(op.outputs), _relative(item.module, unit))
        for item in segment.ops
        for op in (item.op,)
    )
    metas = ((raw.tensors[n], n in held) for n in names)
    tensors = tuple(
        (
            _relative(meta.fqn, unit) if is_held else "",
            tuple(getattr(meta, name) for name in _TOLD_BY_VALUE),
            told(meta.shape),
            None if meta.data is None else repr(meta.data),
        )
        for meta, is_held in metas
    )
    return ops, tensors, tuple(map(names.__getitem__, (*roles.inputs, *roles.outputs)))


_TOLD_BY_VALUE = tuple(
    each.name
    for each in fields(TensorMeta)
    if each.name not in ("name", "fqn", "aliases", "shape", "data")
)
"""Fields of a tensor that are told as they are, by names, words and truths."""


def _canonical(segment: _Segment, roles: _Roles, raw: RawGraph) -> Program:
    """Rename a segment's tensors by role and order, so that equal blocks become equal data."""
    names, unit = roles.names, segment.unit
    ops = []
    for item, base in zip(segment.ops, roles.bases, strict=True):
        renamed = item.op.rename(names.__getitem__)
        module = _relative(item.module, unit)
        ops.append(replace(renamed, name=base, module=module, beside=not item.module))
    tensors = tuple(
        replace(
            raw.tensors[n],
            name=canonical,
            fqn=_relative(raw.tensors[n].fqn, unit) if n in roles.params else "",
            aliases=(),
        )
        for n, canonical in names.items()
    )
    return Program(
        name=re.sub(r"\.\d+(?=\.|$)", ".*", unit.removeprefix("~")) or "root",
        inputs=tuple(names[n] for n in roles.inputs),
        params=tuple(names[n] for n in roles.params),
        outputs=tuple(names[n] for n in roles.outputs),
        tensors=tensors,
        ops=tuple(ops),
    )


def _relative(path: str, unit: str) -> str:
    if path == unit:
        return ""
    return path.removeprefix(unit + ".")
