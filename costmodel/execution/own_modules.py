"""What other runtimes make of code as it was captured: their own modules in its place.

A capture holds what one model's Python issues, op by op. A runtime with modules of its own runs
the same mathematics and never makes some of those tensors:

    activation   GELU by its tanh, op by op                           one kernel
    norm         cast, square, mean, root, product, cast, weight      one kernel
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
from planner.language.graph import Arg, Op, Program, Ref, TensorMeta
from planner.language.layout.placement import Shard, parse_placement
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.ops.families.products.masked_attention import (
    GROUPED_ARGUMENT,
    MASKED,
    MASKED_SHARD,
)
from planner.language.ops.families.products.rings import RING
from planner.language.ops.record import packet_of

GELU = "aten.gelu.default"
RESHAPE = "aten.reshape.default"
NORM = "aten.rms_norm.default"
FLASH = "scaled_dot_product_attention"
VIEWS = ("view", "reshape", "contiguous", "slice", "unsqueeze", "expand", "transpose")
HALVES = ("bfloat16", "float16")
GROUPED_ARGUMENTS = {
    GATHERED: 5,
    MASKED: GROUPED_ARGUMENT,
    MASKED_SHARD: GROUPED_ARGUMENT,
    RING: GROUPED_ARGUMENT,
}
"""Where attention of ours is told whether heads of keys are each that of several queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What takes the place of an op, and dtypes that tensors have after it; ops of which nothing
    is used any more go with it.
    """

    op: Op
    dtypes: Mapping[str, str]
    before: tuple[tuple[Op, TensorMeta], ...] = ()
    """New ops ahead of it, each with its output."""


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


def with_own_modules(program: Program) -> Program:
    """Return a bound program as a runtime with modules of its own runs it."""
    norms = (_norm, _weighted_norm, _cast_norm)
    # The order counts: a norm is found before its weight, and its weight before its last cast.
    # Heads are gathered as they were made before attention takes them so.
    for rule in (_gelu, *norms, _gathered_first, _ungrouped, _cast_logits):
        program = _rewritten(program, rule)
    return program


def _rewritten(program: Program, rule: Rule) -> Program:
    uses = Uses(program=program)
    changes = {op.name: found for op in program.ops if (found := rule(op, uses)) is not None}
    if not changes:
        return program
    ops: list[Op] = []
    added: list[TensorMeta] = []
    for op in program.ops:
        change = changes.get(op.name, Change(op=op, dtypes={}))
        ops += [*(new for new, _ in change.before), change.op]
        added += [meta for _, meta in change.before]
    dtypes = {name: dtype for change in changes.values() for name, dtype in change.dtypes.items()}
    return _without_unused(
        replace(
            program,
            ops=tuple(ops),
            tensors=(
                *(
                    replace(meta, dtype=dtypes[meta.name]) if meta.name in dtypes else meta
                    for meta in program.tensors
                ),
                *added,
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
    # Factors commute, so both orders are tried; likewise below.
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
        # The kernel casts inside, so it takes what the code cast ahead of it.
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
        # What something else takes, too, must be made anyway.
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


def _gathered_first(op: Op, uses: Uses) -> Change | None:
    """Heads that are gathered after a dim was opened to repeat them: gathered as they were made."""
    found = _opened(op.args[0], uses) if op.target == REDISTRIBUTE else None
    if found is None:
        return None
    opened, at = found
    _, axis, source, target, *more = op.args
    heads, gathered = (uses.program.tensor[name] for name in (opened.inputs[0], op.outputs[0]))
    before = [_without_dim(str(place), at) for place in (source, target)]
    if None in before:
        return None
    name = f"{op.name}_first"
    shape = (*gathered.shape[:at], *gathered.shape[at + 1 :])
    moved = replace(op, name=name, args=(Ref(heads.name), axis, *before, *more), outputs=(name,))
    args = (Ref(name), gathered.shape_at(1))
    again = replace(opened, name=op.name, target=RESHAPE, args=args, outputs=op.outputs)
    return Change(op=again, dtypes={}, before=((moved, replace(gathered, name=name, shape=shape)),))


def _opened(arg: Arg, uses: Uses) -> tuple[Op, int] | None:
    """Return the op that makes an argument by opening a dim of size 1, and that dim. On a rank's
    part of a tensor it is a reshape.
    """
    op = uses.made_by(arg, "unsqueeze", "reshape", "view")
    if op is None:
        return None
    before, after = (uses.program.tensor[n].shape_at(1) for n in (op.inputs[0], op.outputs[0]))
    dims = [
        d for d, size in enumerate(after) if size == 1 and (*after[:d], *after[d + 1 :]) == before
    ]
    return (op, dims[0]) if dims else None


def _without_dim(place: str, gone: int) -> str | None:
    """Return a placement of a tensor without one of its dims; None where that dim is split."""
    found = parse_placement(place)
    if not isinstance(found, Shard) or found.dim < gone:
        return place
    return None if found.dim == gone else str(replace(found, dim=found.dim - 1))


def _ungrouped(op: Op, uses: Uses) -> Change | None:
    """Attention whose keys and values were repeated for the queries of a group."""
    at = GROUPED_ARGUMENTS.get(op.target)
    if at is None and packet_of(op.target) != FLASH:
        return None
    sources = [_before_repeat(arg, uses) for arg in op.args[1:3]]
    if None in sources:
        return None
    args = (op.args[0], *sources, *op.args[3:])
    if at is not None:
        return Change(op=replace(op, args=(*args[:at], True, *args[at + 1 :])), dtypes={})
    kwargs = dict(op.kwargs) | {"enable_gqa": True}
    return Change(op=replace(op, args=args, kwargs=tuple(kwargs.items())), dtypes={})


def _before_repeat(arg: Arg, uses: Uses) -> Ref | None:
    """Return the heads (batch, heads, keys, width) of which an argument has each several times."""
    folded = uses.made_by(arg, "reshape", "view", "flatten", "_unsafe_view")
    copied = folded and uses.made_by(folded.args[0], "clone", "contiguous")
    repeated = folded and uses.made_by((copied or folded).args[0], "expand")
    found = repeated and _opened(repeated.args[0], uses)
    if not (folded and repeated and found):
        return None
    source = Ref(found[0].inputs[0])
    tensor = uses.program.tensor
    heads = tensor[source.name].shape_at(1)
    wide, flat = tensor[repeated.outputs[0]].shape_at(1), tensor[folded.outputs[0]].shape_at(1)
    if len(heads) != 4 or len(wide) != 5 or wide != (*heads[:2], wide[2], *heads[2:]):
        return None
    return source if flat == (heads[0], heads[1] * wide[2], *heads[2:]) else None


def _cast_logits(op: Op, uses: Uses) -> Change | None:
    """A cast of half-precision logits of which only a loss takes anything, through views."""
    if packet_of(op.target) not in LOSSES or not isinstance(op.args[0], Ref):
        return None
    path = list(uses.through(op.args[0], "to", *VIEWS))
    casts = [at for at, made in enumerate(path) if packet_of(made.target) == "to"]
    tensor = uses.program.tensor
    # Another reader of the logits would need them in fp32.
    if len(casts) != 1 or any(uses.count[made.outputs[0]] > 1 for made in path):
        return None
    cast = path[casts[0]]
    half = tensor[cast.inputs[0]].dtype
    if half not in HALVES or tensor[cast.outputs[0]].dtype != "float32":
        return None
    # The cast has become a view, which moves nothing.
    dtypes = {made.outputs[0]: half for made in path[: casts[0] + 1]}
    return Change(op=op, dtypes=dtypes)
