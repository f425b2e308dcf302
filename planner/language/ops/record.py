"""The record of an op family: all that the planner takes as given about its ops.

Lowering, the search, the cost model, the memory model and the capture read these records and
have no table of ops of their own. A family registers its record in its file of
`planner.language.ops.families`; `docs/contributing.md` has the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from planner.language.graph import Op, Program, written_buffers
from planner.language.graph.function_keys import AUTOGRAD_FUNCTION
from planner.language.layout.axes import degree_names
from planner.language.layout.placement import parse_placement
from planner.language.layout.redistribute import REDISTRIBUTE, collectives
from planner.language.ops.call import Call, LocalForm, Placed, ProductArgs, Rule, Work
from planner.language.ops.kernel import (
    KernelCall,
    ResultRule,
    SavedRule,
    ScratchRule,
    ViewRule,
    contiguous_result,
    same_memory,
    saves_differentiable_inputs,
)
from planner.language.ops.samples.step import BY_RULES, Across

LocalRule = Callable[[Placed], LocalForm]

Arithmetic = Literal["matmul", "convolution", "attention", "memory"]
"""What bounds an op's time: arithmetic of one of three kinds, or the bytes it moves."""


@dataclass(frozen=True, slots=True)
class ShardRule:
    """A generator of the shardings by which local shards compute the right thing.

    It lists neither the all-replicated sharding nor checks that sizes divide: `registry` does.
    """

    function: Rule
    contiguous: bool = False
    """Shards must be contiguous, or the function offers segments itself. Other shardings are
    offered in segments too: most ops work on any indices of a dim, if all tensors agree."""
    together: bool = False
    """A shard means nothing alone: inside the op ranks exchange numbers, or count from their own
    place in the whole."""
    offered: bool = True
    """Whether layouts may have it; else it only says which entries are computed apart."""
    asked: bool = False
    """Layouts have it only where it is asked for: what ranks exchange inside the op is not among
    the redistributions that solvers of layouts weigh."""


class Numbers(NamedTuple):
    """Whole numbers that an op takes."""

    kind: Literal["any", "order", "ends"]
    """Any below a limit; each below it once; or the ends of equal runs, the last at the limit."""
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFamily:
    """Ops of equal facts. What is not given has the default of an ordinary ATen op: computed by
    every rank in whole, one flop for each entry made, all differentiable inputs saved.
    """

    name: str
    """For messages and tests."""

    targets: tuple[str, ...] = ()
    """`aten.add` (all overloads), `aten.view.default` (one overload), `aten.fft_*` (a prefix)."""

    # ---- sharding
    shard: tuple[ShardRule, ...] = ()
    """Strategies on one mesh axis; without a rule every rank computes the whole."""

    local_form: LocalRule | None = None
    """What runs on a shard where that is not the op unchanged."""

    worth_moving: bool = False
    """The op is worth a redistribution of its inputs (the beam search pursues these ops)."""

    # ---- time
    arithmetic: Arithmetic = "memory"
    """What bounds the time, and so which measurements its time is read from."""

    flop: Callable[[Call], float] | None = None
    """Flop of the forward; None: `flop_per_element` times the entries of the outputs."""

    flop_per_element: int = 1
    """Flop for each entry made. Ops bound by memory need no more than the order of magnitude."""

    backward: Callable[[Call, Work], Work] | None = None
    """Work of the backward from that of the forward; None: twice the flop, inputs read again."""

    reads: Callable[[Call], float] | None = None
    """Bytes the forward reads, where it does not read its inputs whole. Such an op is not fused."""

    kernels: Callable[[Call], tuple[int, int]] | None = None
    """Kernels that the forward and the backward launch; None: one each."""

    rounds: Callable[[Call], int] | None = None
    """In how many equal turns the work is done, each timed as an op of its own; None: at once."""

    numbers: Callable[[Call, str], Numbers] | None = None
    """What a named input of whole numbers may hold, by which the op is timed on made-up ones; None:
    any below the least size of the other inputs."""

    moves_nothing: bool | Callable[[Call], bool] = False
    """No work at all: a view, or a collective, which is priced apart."""

    rows_alone: bool = False
    """Time depends on how many rows the first input has, not on its dims."""

    elements_alone: bool = False
    """On inputs of equal shapes time depends on how many entries they have."""

    deals_rows: bool = False
    """The left factor's rows are dealt in runs to the matrices of the right one's first dim."""

    first_factor: int = 0
    """The input that is a product's left factor; the right one follows."""

    multiplies_in: str = ""
    """Dtype that a product casts its factors to, where it is not that of its inputs."""

    first_term: int = 0
    """The first input of whose entries results are made; those before it say which."""

    weight_product: Callable[[Op], ProductArgs | None] | None = None
    """What is multiplied, for products whose weight gradient may be deferred."""

    # ---- memory
    view: ViewRule | None = None
    """Outputs that have an input's memory."""

    result: ResultRule = contiguous_result
    """How an output with memory of its own lies in it."""

    reshapes: bool = False
    """A view of another shape: its gradient is seen through a reshape."""

    dim_order: Callable[[Op, int], Sequence[int]] | None = None
    """The input's dims in the order in which the output has them, of an op and a count of dims."""

    saved: SavedRule = saves_differentiable_inputs
    """What is saved for backward where an output needs a gradient and is no view."""

    scratch: ScratchRule | None = None
    """Bytes held only while the kernel runs."""

    ahead: Callable[[KernelCall, Sequence[str]], int] | None = None
    """The most bytes that the backward holds before gradients of these inputs are handed on, those
    that it has made by then among them."""

    unreduced: Callable[[KernelCall, Sequence[str]], int] | None = None
    """Bytes of the backward before gradients are summed to their inputs' shapes."""

    inlined: bool = False
    """An op of ours that a compiled graph holds as the ops that it is made of. Nothing is in
    memory between those, nor of what fuses with them ahead."""

    # ---- recomputation, randomness, writes
    recomputed: bool = True
    """Selective recomputation runs it again: cheap beside the memory that it frees."""

    random: bool | Callable[[Op], bool] = False
    """It draws random numbers."""

    mutates: bool = False
    """It writes to one of its inputs (of what capture leaves, a buffer)."""

    eager: str = ""
    """Why a block with it runs op by op where others are compiled, as a clause; empty: it need
    not."""

    # ---- samples
    across: Across = BY_RULES
    """How it treats the samples of a batch (`planner.language.ops.samples`)."""


ORDINARY = OpFamily(name="ordinary ATen op")
FOREIGN = OpFamily(name="op of another library", recomputed=False)
"""Nothing is known of what it costs, so its results are kept."""

_OURS = ("aten", "planner")
_FAMILIES: dict[str, OpFamily] = {}
_PREFIXES: dict[str, OpFamily] = {}


def register(family: OpFamily) -> OpFamily:
    """Add a family's record to the catalogue. Raise ValueError where a target has one already."""
    for target in family.targets:
        table = _PREFIXES if target.endswith("*") else _FAMILIES
        key = target.removesuffix("*")
        if key in table:
            raise ValueError(f"{target} is in two op families: {table[key].name}, {family.name}")
        table[key] = family
    family_of.cache_clear()
    for forget in _READERS:
        forget()
    return family


def unregister(family: OpFamily) -> None:
    """Take a family out of the catalogue."""
    for target in family.targets:
        del (_PREFIXES if target.endswith("*") else _FAMILIES)[target.removesuffix("*")]
    family_of.cache_clear()
    for forget in _READERS:
        forget()


_READERS: list[Callable[[], None]] = []


def forgets(cache_clear: Callable[[], None]) -> None:
    """Have what was derived from records forgotten when the catalogue changes."""
    _READERS.append(cache_clear)


@lru_cache(maxsize=4096)
def family_of(target: str) -> OpFamily:
    """Return the record of a target such as ``aten.linear.default``.

    That of the overload, of the op, of the op it is the in-place form of, or of a prefix, in this
    order; else the default of ATen's and our own ops, or of other libraries' ops.
    """
    packet = target.rpartition(".")[0]
    found = _FAMILIES.get(target) or _FAMILIES.get(packet)
    if found is not None:
        return found
    is_ours = target.partition(".")[0] in _OURS
    if is_in_place(target):
        base = _FAMILIES.get(packet.removesuffix("_"), ORDINARY)
        return OpFamily(
            name=f"{base.name}, in place",
            view=same_memory,
            random=base.random,
            recomputed=is_ours,
            mutates=True,
        )
    prefixes = [prefix for prefix in _PREFIXES if target.startswith(prefix)]
    if prefixes:
        return _PREFIXES[max(prefixes, key=len)]
    return ORDINARY if is_ours else FOREIGN


def is_in_place(target: str) -> bool:
    """Whether an op's name says that it writes to its first input, as ``aten.add_.Tensor``."""
    name = packet_of(target)
    return name.endswith("_") and not name.endswith("__")


def packet_of(target: str) -> str:
    """Return ``linear`` of ``aten.linear.default``; a name without dots is its own packet."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def all_families() -> tuple[OpFamily, ...]:
    """Return the records of the catalogue, each once."""
    return tuple({id(f): f for f in (*_FAMILIES.values(), *_PREFIXES.values())}.values())


def aten(names: str) -> tuple[str, ...]:
    """Return targets of ATen ops whose names are parted by spaces."""
    return tuple(f"aten.{name}" for name in names.split())


def op_inside(op: Op) -> Op:
    """Return the op that runs where another one gives it its own stream of random numbers."""
    if op.target != OWN_RANDOM_STREAM:
        return op
    return replace(op, target=str(op.args[0]), args=op.args[2:])


OWN_RANDOM_STREAM = "planner.with_own_random_stream"
"""Args (target, axis name, the target's own args): draws differ on each rank of the axis."""


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers (attention and recurrent layers do for their dropout)."""
    draws = family_of(op.target).random
    return draws if isinstance(draws, bool) else draws(op)


def mutates(op: Op) -> bool:
    """Whether an op writes into one of its inputs (a buffer, in what capture leaves)."""
    return family_of(op.target).mutates


def why_eager(program: Program) -> str | None:
    """Return why a lowered program runs op by op in any case, as a clause; None: it need not."""
    for op in program.ops:
        if op.target == AUTOGRAD_FUNCTION:
            return "it calls an autograd function of the model's own"
        inside = op_inside(op)
        if family_of(op.target).eager:
            return family_of(op.target).eager
        if inside is not op and is_random(inside) and "attention" in inside.target:
            # Compiled it would be the plain formula, which saves all scores.
            return "its attention drops numbers of this rank's own"
    return None


def names_axis(op: Op) -> bool:
    """Whether an op of a lowered program reads on which of an axis's ranks it runs, or what others
    of them have.
    """
    axes = {*degree_names(), "batch"}
    values = (*op.args, *(value for _, value in op.kwargs))
    return op.target.startswith("planner.") and not axes.isdisjoint(
        value for value in values if isinstance(value, str)
    )


def why_no_graph(program: Program) -> str | None:
    """Return why no CUDA graph holds a lowered program, as a clause; None: one does."""
    if written_buffers(program):
        return "it writes buffers"
    for op in program.ops:
        if op.target == REDISTRIBUTE:
            src, dst = (parse_placement(str(place)) for place in op.args[2:4])
            if collectives(src, dst, bool(op.args[4])) == (None, None):
                continue
        if names_axis(op):
            return "its ranks exchange values inside it"
        if is_random(op_inside(op)):
            return "it draws random numbers"
        if mutates(op):
            return "it writes buffers"
    return why_eager(program)
