"""What other runtimes make of code as it was captured: their own modules in its place.

A capture holds what one model's Python issues, op by op. A runtime with modules of its own runs
the same mathematics and never makes some of those tensors:

    activation   GELU by its tanh, op by op                           one kernel
    norm         cast, square, mean, root, product, cast, weight      one kernel
    causal mask  positions compared, for every pair of them           the kernel leaves half out
    grouped k/v  each head repeated for the queries that share it     the kernel reads it again
    logits       cast to fp32 ahead of the loss                       the loss's kernel reads them

Each is a rewrite of a rank's program, so that seconds and bytes follow from one graph. What is not
recognised stays as it was captured, and is priced so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from costmodel.execution.executed_kernels import LOSSES
from costmodel.execution.rings import GATHERED
from planner.graph import Arg, ModelGraph, Op, Program, Ref
from planner.layout.redistribute import REDISTRIBUTE
from planner.ops.record import packet_of

GELU = "aten.gelu.default"
NORM = "aten.rms_norm.default"
FLASH = "scaled_dot_product_attention"
VIEWS = ("view", "reshape", "contiguous", "slice", "unsqueeze", "expand", "transpose")
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What takes the place of an op, and dtypes that tensors have after it; ops of which nothing
    is used any more go with it.
    """

    op: Op
    dtypes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Uses:
    """Who makes and who takes each tensor of a program."""

    program: Program

    @cached_property
    def maker(self) -> Mapping[str, Op]:
        """The op that makes a tensor."""
        return {name: op for op in self.program.ops for name in op.outputs}

    @cached_property
    def count(self) -> Counter[str]:
        """How often a tensor is taken, by ops or as an output."""
        taken = Counter(name for op in self.program.ops for name in op.inputs)
        taken.update(self.program.outputs)
        return taken

    def made_by(self, arg: Any, *packets: str) -> Op | None:
        """Return the op that makes an argument if it is one of these."""
        op = self.maker.get(arg.name) if isinstance(arg, Ref) else None
        return op if op is not None and packet_of(op.target) in packets else None

    def through(self, arg: Any, *packets: str) -> Iterator[Op]:
        """Yield the ops of these that lead to an argument, the last first."""
        while (op := self.made_by(arg, *packets)) is not None:
            yield op
            arg = op.args[0]


Rule = Callable[[Op, Uses], Change | None]


def with_own_modules(program: Program, causal: frozenset[str] = frozenset()) -> Program:
    """Return a bound program as a runtime with modules of its own runs it.

    `causal` are the inputs that are causal masks and nothing else.
    """

    def unmasked(op: Op, uses: Uses) -> Change | None:
        return _unmasked(op, uses, causal)

    for rule in (_gelu, _norm, _weighted_norm, _cast_norm, _ungrouped, unmasked, _cast_logits):
        program = _rewritten(program, rule)
    return program


def _rewritten(program: Program, rule: Rule) -> Program:
    uses = Uses(program=program)
    changes = {op.name: found for op in program.ops if (found := rule(op, uses)) is not None}
    if not changes:
        return program
    ops = [changes[op.name].op if op.name in changes else op for op in program.ops]
    dtypes = {name: dtype for change in changes.values() for name, dtype in change.dtypes.items()}
    return _without_unused(
        replace(
            program,
            ops=tuple(ops),
            tensors=tuple(
                replace(meta, dtype=dtypes[meta.name]) if meta.name in dtypes else meta
                for meta in program.tensors
            ),
        )
    )


def _without_unused(program: Program) -> Program:
    """Return the program without ops that nothing takes anything of; its inputs stay."""
    needed = set(program.outputs)
    kept: list[Op] = []
    for op in reversed(program.ops):
        if needed.intersection(op.outputs):
            kept.append(op)
            needed.update(op.inputs)
    made = {name for op in kept for name in op.outputs}
    given = {*program.inputs, *program.params}
    return replace(
        program,
        ops=tuple(reversed(kept)),
        tensors=tuple(meta for meta in program.tensors if meta.name in made | given),
    )


def _gelu(op: Op, uses: Uses) -> Change | None:
    """GELU as Hugging Face writes it: x / 2 * (1 + tanh(a (x + b x ** 3)))."""
    if packet_of(op.target) != "mul" or len(op.inputs) != 2:
        return None
    for half, one_more in (op.args[:2], op.args[1::-1]):
        halved = uses.made_by(half, "mul")
        added = uses.made_by(one_more, "add")
        tanh = added and uses.made_by(added.args[0], "tanh")
        scaled = tanh and uses.made_by(tanh.args[0], "mul")
        inner = scaled and uses.made_by(scaled.args[0], "add")
        if not (halved and added and inner) or halved.args[1] != 0.5 or added.args[1] != 1.0:
            continue
        source = halved.args[0]
        cubes = list(uses.through(inner.args[1], "mul", "pow"))
        is_cube = len(cubes) == 2 and cubes[1].args == (source, 3.0)
        if isinstance(source, Ref) and inner.args[0] == source and is_cube:
            kwargs = (("approximate", "tanh"),)
            return Change(op=replace(op, target=GELU, args=(source,), kwargs=kwargs), dtypes={})
    return None


def _norm(op: Op, uses: Uses) -> Change | None:
    """A norm without a weight, whatever its dtypes: x / sqrt(mean(x ** 2) + epsilon)."""
    if packet_of(op.target) != "mul" or len(op.inputs) != 2:
        return None
    for wide, root in (op.args[:2], op.args[1::-1]):
        rsqrt = uses.made_by(root, "rsqrt")
        added = rsqrt and uses.made_by(rsqrt.args[0], "add")
        mean = added and uses.made_by(added.args[0], "mean")
        squared = mean and uses.made_by(mean.args[0], "pow", "mul")
        if not (added and mean and squared):
            continue
        is_square = squared.args in ((wide, 2), (wide, 2.0), (wide, wide))
        if not is_square or mean.args[1] != (-1,) or not isinstance(added.args[1], float):
            continue
        cast = uses.made_by(wide, "to")
        source = cast.args[0] if cast is not None else wide
        assert isinstance(source, Ref)
        return _norm_op(op, uses, source, None, added.args[1])
    return None


def _weighted_norm(op: Op, uses: Uses) -> Change | None:
    """A norm times a weight for each entry of its last dim, with a cast between."""
    if packet_of(op.target) != "mul" or len(op.inputs) != 2:
        return None
    for made, weight in (op.args[:2], op.args[1::-1]):
        if not isinstance(weight, Ref) or len(uses.program.tensor[weight.name].shape) != 1:
            continue
        casts = list(uses.through(made, "to"))
        norm = uses.made_by(casts[-1].args[0] if casts else made, "rms_norm")
        if norm is None or norm.args[2] is not None:
            continue
        if any(uses.count[part.outputs[0]] > 1 for part in (*casts, norm)):
            continue
        return _norm_op(op, uses, norm.args[0], weight, norm.args[3])
    return None


def _cast_norm(op: Op, uses: Uses) -> Change | None:
    """A norm that is cast to half precision after its weight."""
    norm = uses.made_by(op.args[0], "rms_norm") if packet_of(op.target) == "to" else None
    if norm is None or uses.count[norm.outputs[0]] > 1:
        return None
    dtypes = [uses.program.tensor[made.outputs[0]].dtype for made in (norm, op)]
    if dtypes[0] != "float32" or dtypes[1] not in HALVES:
        return None
    source, _, weight, epsilon = norm.args
    return _norm_op(op, uses, source, weight, epsilon)


def _norm_op(op: Op, uses: Uses, source: Arg, weight: Arg, epsilon: Arg) -> Change:
    width = uses.program.tensor[op.outputs[0]].shape_at(1)[-1]
    args = (source, (width,), weight, epsilon)
    return Change(op=replace(op, target=NORM, args=args, kwargs=()), dtypes={})


def _ungrouped(op: Op, uses: Uses) -> Change | None:
    """Attention whose keys and values were repeated for the queries of a group."""
    if packet_of(op.target) != FLASH:
        return None
    sources = [_before_repeat(arg, uses) for arg in op.args[1:3]]
    if None in sources:
        return None
    args = (op.args[0], *sources, *op.args[3:])
    kwargs = dict(op.kwargs) | {"enable_gqa": True}
    return Change(op=replace(op, args=args, kwargs=tuple(kwargs.items())), dtypes={})


def _before_repeat(arg: Arg, uses: Uses) -> Ref | None:
    """Return the heads (batch, heads, keys, width) of which an argument has each several times."""
    folded = uses.made_by(arg, "reshape", "view", "flatten", "_unsafe_view")
    copied = folded and uses.made_by(folded.args[0], "clone", "contiguous")
    repeated = folded and uses.made_by((copied or folded).args[0], "expand")
    opened = repeated and uses.made_by(repeated.args[0], "unsqueeze")
    if not (folded and repeated and opened) or not isinstance(opened.args[0], Ref):
        return None
    tensor = uses.program.tensor
    heads = tensor[opened.args[0].name].shape_at(1)
    wide, flat = tensor[repeated.outputs[0]].shape_at(1), tensor[folded.outputs[0]].shape_at(1)
    if len(heads) != 4 or len(wide) != 5 or wide != (*heads[:2], wide[2], *heads[2:]):
        return None
    return opened.args[0] if flat == (heads[0], heads[1] * wide[2], *heads[2:]) else None


def _unmasked(op: Op, uses: Uses, causal: frozenset[str]) -> Change | None:
    """Attention under a causal mask that is made as a tensor; over part of the queries where
    positions are divided.
    """
    if packet_of(op.target) != FLASH:
        return None
    given = dict(zip(("query", "key", "value", *_ATTENTION), op.args, strict=False))
    given |= dict(op.kwargs)
    mask = given.get("attn_mask")
    if not isinstance(mask, Ref) or given.get("is_causal", False):
        return None
    moved = uses.maker.get(mask.name)
    while moved is not None and moved.target == REDISTRIBUTE:
        mask = Ref(moved.inputs[0])
        moved = uses.maker.get(mask.name)
    if mask.name not in causal:
        return None
    tensor = uses.program.tensor
    queries, keys = (tensor[name].shape_at(1)[-2] for name in op.inputs[:2])
    dropout, scale = given.get("dropout_p", 0.0), given.get("scale")
    grouped = given.get("enable_gqa", False)
    if queries != keys:
        args = (*op.args[:3], dropout, scale, grouped, 1, "cp")
        return Change(op=replace(op, target=GATHERED, args=args, kwargs=()), dtypes={})
    args = (*op.args[:3], None, dropout, True)
    named = (("scale", scale), ("enable_gqa", grouped))
    return Change(op=replace(op, args=args, kwargs=named), dtypes={})


_ATTENTION = ("attn_mask", "dropout_p", "is_causal")
"""What attention takes after query, key and value, by position."""


def _cast_logits(op: Op, uses: Uses) -> Change | None:
    """A cast of half-precision logits of which only a loss takes anything, through views."""
    if packet_of(op.target) not in LOSSES or not isinstance(op.args[0], Ref):
        return None
    path = list(uses.through(op.args[0], "to", *VIEWS))
    casts = [at for at, made in enumerate(path) if packet_of(made.target) == "to"]
    tensor = uses.program.tensor
    if len(casts) != 1 or any(uses.count[made.outputs[0]] > 1 for made in path):
        return None
    cast = path[casts[0]]
    half = tensor[cast.inputs[0]].dtype
    if half not in HALVES or tensor[cast.outputs[0]].dtype != "float32":
        return None
    # The cast has become a view, which moves nothing.
    dtypes = {made.outputs[0]: half for made in path[: casts[0] + 1]}
    return Change(op=op, dtypes=dtypes)


# ------------------------------------------------------------------------------------ causal masks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Positions:
    """Numbers 0, 1, .. along one dim of a tensor of so many dims."""

    dim: int
    rank: int


def causal_masks(graph: ModelGraph) -> frozenset[str]:
    """Return the values of a graph's preamble that are causal masks of every pair of positions,
    made of positions alone: True where a key is no later than a query.
    """
    known: dict[str, _Positions | str] = {}
    for op in graph.preamble.ops:
        if len(op.outputs) == 1 and (found := _followed(op, known)) is not None:
            known[op.outputs[0]] = found
    return frozenset(name for name in graph.preamble.outputs if known.get(name) == "causal")


def _followed(op: Op, known: Mapping[str, _Positions | str]) -> _Positions | str | None:
    """Return what an op makes of positions: positions, a causal mask, or nothing that is known."""
    packet, first = packet_of(op.target), known.get(op.inputs[0]) if op.inputs else None
    if packet == "arange":
        return _Positions(dim=0, rank=1) if len(op.args) == 1 else None
    if first is None:
        return None
    if first == "causal":
        return first if packet in ("expand", "contiguous", "clone", "to") else None
    assert isinstance(first, _Positions)
    if packet in ("to", "contiguous", "clone") or (packet in ("add", "sub") and op.args[1] == 0):
        return first
    if packet == "unsqueeze":
        at = op.args[1]
        assert isinstance(at, int)
        at += (first.rank + 1) * (at < 0)
        return _Positions(dim=first.dim + (at <= first.dim), rank=first.rank + 1)
    if packet in _COMPARISONS and len(op.inputs) == 2:
        pair = (first, known.get(op.inputs[1]))
        keys, queries = pair if packet == "le" else pair[::-1]
        if isinstance(keys, _Positions) and isinstance(queries, _Positions):
            from_end = keys.dim - keys.rank, queries.dim - queries.rank
            return "causal" if from_end == (-1, -2) else None
    return None


_COMPARISONS = ("le", "ge")


def causal_inputs(graph: ModelGraph, masks: frozenset[str]) -> Mapping[int, frozenset[str]]:
    """Return, by class, the inputs of its program that are a causal mask in all its blocks."""
    found: dict[int, frozenset[str]] = {}
    for block in graph.blocks:
        names = graph.classes[block.class_index].inputs
        mine = {own for own, name in zip(names, block.inputs, strict=True) if name in masks}
        index = block.class_index
        found[index] = found.get(index, frozenset(mine)) & mine
    return found
