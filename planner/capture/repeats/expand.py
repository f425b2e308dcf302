"""The ops of all layers, from those of a model that has only the first few of a list.

    captured    before | P0 | P1 | P2 | after          P: a period of layers
    expanded    before | P0 | P1 | P1' P1'' ... | P2 | after

A copy reads of the copy before it what P1 reads of P0, P2 reads of the last copy what it read of
P1, and layers of P2 and after are numbered on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.capture.blocks import RawGraph, RawOp
from planner.capture.repeats.find import PERIODS, Repeat
from planner.language.graph import TensorMeta, iter_refs, map_refs
from planner.language.graph.function_keys import AUTOGRAD_FUNCTION


class NotRepeated(Exception):
    """The captured periods differ, or are not read as the trace said; all must be captured."""


def expand(short: RawGraph, repeat: Repeat, order: Sequence[str]) -> RawGraph:
    """Return the ops of the whole model.

    `order` are the names of its parameters as the module lists them. Raises NotRepeated.
    """
    periods = _periods(short, repeat)
    layers = _Layers(short, repeat)
    _check_equal(short, layers, periods)
    copies = repeat.left_out // repeat.period
    tensors = {name: layers.moved(meta) for name, meta in short.tensors.items()}
    renamed = {old: meta.name for old, meta in tensors.items()}
    taken = set(renamed.values())
    if len(taken) != len(tensors):
        raise NotRepeated("two tensors would have one name")
    made: dict[str, TensorMeta] = {}
    ops = [layers.at(item, renamed) for item in short.ops[: periods[2][0]]]
    second = short.ops[slice(*periods[1])]
    before = _outputs(short.ops[slice(*periods[0])])
    own = _outputs(second)
    last = dict(zip(own, own, strict=True))  # names of what the copy before made, by P1's
    # Each copy is P1 with the names of its own layers, reading the copy before it as P1 reads P0.
    held = layers.held_in(1, second)
    for copy in range(1, copies + 1):
        names: dict[str, str] = {}
        for meta in held:
            copied = layers.copied(meta, copy)
            if copied.name in taken or copied.name in made:
                raise NotRepeated(f"{copied.name} is there already")
            names[meta.name] = copied.name
            made[copied.name] = copied
        reads = {old: last[new] for old, new in zip(before, own, strict=True)}
        for name in own:
            fresh = f"{name}_of_copy_{copy}"
            made[fresh] = replace(short.tensors[name], name=fresh)
            names[name] = fresh
        lookup = renamed | reads | names
        ops += [layers.copied_op(item, lookup, copy) for item in second]
        last = {name: names[name] for name in own}
    # P2 and what follows read of the last copy what they read of P1.
    ops += [layers.at(item, renamed | last) for item in short.ops[periods[2][0] :]]
    everything = {meta.name: meta for meta in tensors.values()} | made
    place = {fqn: number for number, fqn in enumerate(order)}
    params = [m for m in everything.values() if m.kind == "param"]
    if any(meta.fqn not in place for meta in params):
        raise NotRepeated("the whole model lacks a parameter")
    params.sort(key=lambda meta: place[meta.fqn])
    others = [meta for meta in everything.values() if meta.kind != "param"]
    return RawGraph(
        tensors={meta.name: meta for meta in (*params, *others)},
        inputs=short.inputs,
        ops=tuple(ops),
        loss=renamed[short.loss],
    )


def _outputs(ops: Sequence[RawOp]) -> list[str]:
    return [name for item in ops for name in item.op.outputs]


def _periods(short: RawGraph, repeat: Repeat) -> list[tuple[int, int]]:
    """Return where the three periods begin and end in the ops; the last where P1 would."""
    begins: dict[int, int] = {}
    pattern = re.compile(rf"{re.escape(repeat.path)}\.(\d+)(?:\.|$)")
    latest = -1
    for place, item in enumerate(short.ops):
        match = pattern.match(item.module)
        if match is None:
            continue
        layer = int(match[1])
        begins.setdefault(layer, place)
        if layer < latest:
            raise NotRepeated("layers are not in order")
        latest = layer
    if sorted(begins) != list(range(repeat.kept)):
        raise NotRepeated("a layer has no op")
    # The first op of each period; of the last, whose end no layer marks, as many ops as P1 has.
    starts = [begins[repeat.first + number * repeat.period] for number in range(PERIODS)]
    length = starts[2] - starts[1]
    end = starts[2] + length
    if starts[1] - starts[0] < 1 or end > len(short.ops):
        raise NotRepeated("the last period is shorter")
    return [(starts[0], starts[1]), (starts[1], starts[2]), (starts[2], end)]


@dataclass(frozen=True)
class _Layers:
    """Numbers of layers in names, of a captured graph and of copies."""

    short: RawGraph
    repeat: Repeat

    @property
    def first_moved(self) -> int:
        """The layer that P2 begins with; it and those after it are numbered on."""
        return self.repeat.first + 2 * self.repeat.period

    def number_of(self, path: str) -> int | None:
        """Return the layer that a module or parameter is in."""
        prefix = f"{self.repeat.path}."
        head = path.removeprefix(prefix).split(".")[0] if path.startswith(prefix) else ""
        return int(head) if head.isdigit() else None

    def moved(self, meta: TensorMeta) -> TensorMeta:
        """Return what a tensor of the captured graph is in the whole one."""
        number = self.number_of(meta.fqn) if meta.kind in ("param", "buffer", "constant") else None
        if number is None:
            return meta
        if meta.aliases:
            raise NotRepeated(f"{meta.fqn} is tied")
        on = self.repeat.left_out if number >= self.first_moved else 0
        return self._renumbered(meta, number, number + on) if on else meta

    def copied(self, meta: TensorMeta, copy: int) -> TensorMeta:
        """Return a parameter, buffer or constant of P1 as a copy has it."""
        number = self.number_of(meta.fqn)
        if number is None:
            return replace(meta, name=f"{meta.name}_of_copy_{copy}")
        return self._renumbered(meta, number, number + copy * self.repeat.period)

    def _renumbered(self, meta: TensorMeta, number: int, other: int) -> TensorMeta:
        path = self.repeat.path
        stem = f"{path}_{number}_".replace(".", "_")
        # (Export names a parameter by its path, with underscores for dots.)
        if meta.name.count(stem) == 1:
            name = meta.name.replace(stem, f"{path}_{other}_".replace(".", "_"))
        else:
            name = f"{meta.name}_of_layer_{other}"
        return replace(meta, name=name, fqn=self._path(meta.fqn, number, other))

    def _path(self, path: str, number: int, other: int) -> str:
        return f"{self.repeat.path}.{other}" + path.removeprefix(f"{self.repeat.path}.{number}")

    def held_in(self, period: int, ops: Sequence[RawOp]) -> list[TensorMeta]:
        """Return what the layers of a period hold, and constants that its ops alone read."""
        first = self.repeat.first + period * self.repeat.period
        layers = range(first, first + self.repeat.period)
        of_ops = set(map(id, ops))
        inside = {n for item in ops for n in item.op.inputs}
        # (A constant that other ops read too is common to all copies.)
        inside -= {n for it in self.short.ops if id(it) not in of_ops for n in it.op.inputs}
        return [
            meta
            for meta in self.short.tensors.values()
            if meta.kind in ("param", "buffer", "constant")
            and (self.number_of(meta.fqn) in layers or (not meta.fqn and meta.name in inside))
        ]

    def at(self, item: RawOp, names: Mapping[str, str]) -> RawOp:
        """Return an op of the captured graph in the whole one."""
        number = self.number_of(item.module)
        on = self.repeat.left_out if number is not None and number >= self.first_moved else 0
        module = self._path(item.module, number, number + on) if on and number else item.module
        return RawOp(op=item.op.rename(lambda old: names.get(old, old)), module=module)

    def copied_op(self, item: RawOp, names: Mapping[str, str], copy: int) -> RawOp:
        """Return an op of P1 in a copy."""
        number = self.number_of(item.module)
        module = item.module
        if number is not None:
            module = self._path(module, number, number + copy * self.repeat.period)
        name = f"{item.op.name}_of_copy_{copy}"
        op = replace(item.op, name=name).rename(lambda old: names.get(old, old))
        return RawOp(op=op, module=module)


def _check_equal(short: RawGraph, layers: _Layers, periods: Sequence[tuple[int, int]]) -> None:
    """Raise NotRepeated where P2 is not P1, one period on, or what follows reads more than P2."""
    zeroth, first, second = (short.ops[slice(*each)] for each in periods)
    if any(item.op.target == AUTOGRAD_FUNCTION for item in first):
        raise NotRepeated("autograd functions are numbered")
    # P1 told relative to P0, and P2 to P1: equal if each follows from the period before in the
    # same way.
    told = [
        _told(short, layers, ops, before, number)
        for number, (ops, before) in enumerate(((first, zeroth), (second, first)), start=1)
    ]
    if told[0] != told[1]:
        raise NotRepeated("two periods differ")
    # What ops of P0 and P1 make is read by the period after, no further.
    for made, readers in (
        (zeroth, short.ops[periods[1][1] :]),
        (first, short.ops[periods[2][1] :]),
    ):
        outputs = set(_outputs(made))
        if any(outputs.intersection(item.op.inputs) for item in readers):
            raise NotRepeated("a tensor is read further on than in the next period")
    if [item.op.target for item in zeroth] != [item.op.target for item in first]:
        raise NotRepeated("the first period is another")


def _told(
    short: RawGraph,
    layers: _Layers,
    ops: Sequence[RawOp],
    before: Sequence[RawOp],
    period: int,
) -> list[Any]:
    """Return a period's ops with names told relative to it."""
    on = (period - 1) * layers.repeat.period
    own = {name: ("here", at) for at, name in enumerate(_outputs(ops))}
    previous = {name: ("before", at) for at, name in enumerate(_outputs(before))}
    held = {meta.name for meta in layers.held_in(period, ops)}

    def tell(name: str) -> Any:
        if name in own:
            return own[name]
        if name in previous:
            return previous[name]
        meta = short.tensors[name]
        if name not in held:
            return name
        number = layers.number_of(meta.fqn)
        fqn = meta.fqn if number is None else layers._path(meta.fqn, number, number - on)
        return replace(meta, name="", fqn=fqn)

    found: list[Any] = []
    for item in ops:
        number = layers.number_of(item.module)
        module = item.module if number is None else layers._path(item.module, number, number - on)
        arguments = (item.op.args, tuple(value for _, value in item.op.kwargs))
        bare = map_refs(arguments, lambda ref: "tensor")
        keys = tuple(key for key, _ in item.op.kwargs)
        read = [tell(ref.name) for ref in iter_refs(arguments)]
        metas = [replace(short.tensors[name], name="") for name in item.op.outputs]
        found.append((item.op.target, module, repr(bare), keys, read, metas))
    return found
