"""How a record says that its ops treat samples, and one op with the states of its inputs.

A `Walk` is a pass over a program (`planner.language.across.follow`); a `Step` is its op of the
moment. `Across` has what the walk needs of an op's record; its handlers say what sharding rules do
not, and note on the step where samples meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planner.language.graph import SAMPLE, Affine, Arg, Op, Program, Ref, Size, TensorMeta, Unit
from planner.language.graph.mixing import Kind
from planner.language.layout.placement import Shard
from planner.language.ops.call import Call, Rule
from planner.language.ops.samples.state import (
    ANY_ORDER,
    IN_ORDER,
    WHOLE,
    State,
    growing_dims,
    joined_sums,
)

BOUND = 2 * 1009
"""The microbatch size at which rules are evaluated: even, and no size that a model has."""

AXIS = 2
NONE, MEAN = 0, 1
"""ATen's numbers for a loss's `reduction`."""


Algebra = Literal[
    "sum", "mean", "product", "quotient", "addition", "rearrangement", "cast", "other"
]
"""How the size of a result follows from the size of a batch."""

Handler = Callable[["Step"], tuple[State, ...] | None]
"""What an op leaves of its inputs' states; None where the rules decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """How an op treats the samples of a batch (read by `planner.language.across`)."""

    rule: Rule | None = None
    """For ops without sharding rule: the shardings by which samples are computed alone."""
    handlers: tuple[Handler, ...] = ()
    """What no rule says, in the order in which they are tried before the rules."""
    algebra: Algebra = "other"
    """How a result grows with the number of samples."""
    in_runs: bool = False
    """Where in a dim the rows of a sample lie matters, and is kept."""
    sizes_only: bool = False
    """Integer arguments are sizes and places, not values: one may be the batch's size."""
    keeps_numbers: bool = False
    """Entries that are numbers of rows stay the same numbers, in more places."""
    counts: bool = False
    """The entries of a result are whole numbers, whatever its dtype."""
    reduction_arg: int | None = None
    """For losses: the position of ATen's `reduction` (0 none, 1 mean, 2 sum)."""


BY_RULES = Across()
"""Of an op whose sharding rules say all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One place where samples meet: the op to blame, and the op where it matters."""

    kind: Kind
    op: str
    used_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of one op by which parts of a batch give what the whole gives.

    Attributes:
        op: the op's name in its program.
        at: which of its tensors (by place in `Op.inputs`), or with `is_number` of its arguments.
        share: the share that the term is multiplied by (see `State.share`); None: what stands there
            is replaced by its value of the whole batch.
        is_number: whether it is a plain number, or the number of samples.
    """

    op: str
    at: int
    share: str | None = None
    is_number: bool = False


@dataclass(kw_only=True)
class Walk:
    """One pass over a program. Mutable: states, faults and edits grow."""

    program: Program
    """As captured: sizes may depend on the batch."""
    states: dict[str, State]
    """By tensor; those of inputs and params are given."""
    unit: Unit = SAMPLE
    """Which samples belong together: what sizes count as one."""
    bound: Mapping[str, TensorMeta] = field(init=False)
    """Tensors at the microbatch size `BOUND`."""
    maker: dict[str, Op] = field(init=False)
    """The op that makes a tensor."""
    users: dict[str, list[Op]] = field(init=False)
    """The ops that read a tensor."""
    written: set[str] = field(default_factory=set)
    """Buffers that are written, and what follows from them."""
    counted: dict[tuple[object, ...], str] = field(default_factory=dict)
    """The op of the first mean over some labels that count: others are over the same."""
    faults: dict[Fault, None] = field(default_factory=dict)
    """Where samples meet, in order of their discovery."""
    edits: dict[Edit, None] = field(default_factory=dict)
    """What makes parts give what the whole batch gives."""

    def __post_init__(self) -> None:
        self.bound = self.program.bind(BOUND).tensor
        self.maker = {name: op for op in self.program.ops for name in op.outputs}
        self.users = {}
        for op in self.program.ops:
            for name in dict.fromkeys(op.inputs):
                self.users.setdefault(name, []).append(op)

    def write(self, ops: Iterable[Op]) -> None:
        """Note the ops that write to their first input: what follows is no constant of a step."""
        self.written.update(op.inputs[0] for op in ops)
        for op in self.program.ops:
            if self.written.intersection(op.inputs):
                self.written.update(op.outputs)  # what follows from buffers that are written
        for name in self.written.intersection(self.program.params):
            if name in self.states:
                self.states[name] = replace(self.states[name], pure=False)

    def named(self, name: str) -> str:
        """Return the name of an op or a tensor as that of this block's
        (`planner.language.across.walk`).
        """
        return f":{name}"


@dataclass(slots=True, kw_only=True)
class Step:
    """One op with the states of its inputs. Mutable: a fault makes states simpler.

    What it finds counts when `commit` is called: an op is tried in several ways.
    """

    walk: Walk
    op: Op
    states: list[State]
    facts: Across
    """What the op's record says of samples."""
    rules: Callable[[Step], tuple[State, ...]]
    """What the rules of the record say, for handlers that add to it."""
    faults: dict[Fault, None] = field(default_factory=dict)
    edits: dict[Edit, None] = field(default_factory=dict)

    def named(self, name: str) -> str:
        """Return a name as that of this block's."""
        return self.walk.named(name)

    def commit(self) -> None:
        """Add what was found to the walk."""
        self.walk.faults |= self.faults
        self.walk.edits |= self.edits

    def take_number(self, at: int) -> None:
        """Let the op take the whole batch's number of samples for that of a part."""
        self.edits[Edit(op=self.op.name, at=at, is_number=True)] = None

    def take_whole(self, at: int) -> None:
        """Let the op take an input's value of the whole batch."""
        self.edits[Edit(op=self.op.name, at=at)] = None

    def scale(self, name: str, share: str) -> None:
        """Let the op take a tensor times its share."""
        for at, each in enumerate(self.op.inputs):
            if each == name:
                self.edits[Edit(op=self.op.name, at=at, share=share)] = None

    def scale_number(self, at: int, share: str) -> None:
        """Let the op take a number among its arguments times its share."""
        self.edits[Edit(op=self.op.name, at=at, share=share, is_number=True)] = None

    @property
    def packet(self) -> str:
        """The op's name without its overload, if it has any (some ops of ours have none)."""
        return ".".join(self.op.target.split(".")[:2])

    @property
    def call(self) -> Call:
        """The op on tensors with numbers for sizes."""
        return Call(self.op.bind(BOUND), self.walk.bound, AXIS)

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or by keyword, as captured."""
        if index < len(self.op.args):
            return self.op.args[index]
        return next((value for key, value in self.op.kwargs if key == name), default)

    def of(self, arg: Arg) -> State:
        """Return the state of a tensor in the arguments; WHOLE for anything else."""
        return self.states[self.op.inputs.index(arg.name)] if isinstance(arg, Ref) else WHOLE

    def shape(self, ref: Ref | str) -> tuple[Size, ...]:
        """Return a tensor's shape as captured."""
        return self.walk.program.tensor[ref.name if isinstance(ref, Ref) else ref].shape

    def growing(self, name: str) -> list[int]:
        """Return the dims of a tensor whose size grows with the batch."""
        return growing_dims(self.walk.program.tensor[name])

    def each(self, name: str, dim: int) -> int:
        """Return how many rows of a tensor's dim a sample has."""
        size = self.shape(name)[dim]
        return size.per_sample if isinstance(size, Affine) and size.fixed == 0 else 0

    def grows(self) -> bool:
        """Whether sizes or numbers of an op without samples depend on how many there are."""
        return any(map(self.growing, self.op.outputs)) or bool(self.batch_sizes())

    def batch_sizes(self) -> list[Affine]:
        """Return the arguments that are values computed from the number of samples."""
        if self.facts.sizes_only or any(
            edit.is_number and edit.share is None for edit in self.edits
        ):
            return []
        values = (*self.op.args, *(value for _, value in self.op.kwargs))
        return [value for value in values if isinstance(value, Affine)]

    def compares(self, names: Iterable[str]) -> bool:
        """Whether a tensor has an entry for each pair of samples."""
        return any(len(self.growing(name)) > 1 for name in names)

    def blame(self, kind: Kind, *causes: str) -> None:
        """Note a fault of this op, or of the ops that `causes` names.

        Where samples are compared already, or were lost, what follows is the same fault.
        """
        follows = self.compares(self.op.inputs) or any(state.lost for state in self.states)
        if kind in ("buffer", "repeated") or not follows:
            for cause in causes or (self.op.name,):
                self.faults[Fault(kind=kind, op=cause, used_by=self.op.name)] = None

    def blame_sums(self) -> None:
        """Note that sums over samples are used otherwise than as terms of the loss."""
        causes = joined_sums(self.states)
        if causes:
            self.blame("mixed", *causes)
        self.states = [WHOLE if state.sums else state for state in self.states]

    def anything(self) -> tuple[State, ...]:
        """Return what to go on with after a fault: samples where sizes grow."""
        return tuple(self._plain(name) for name in self.op.outputs)

    def _plain(self, name: str) -> State:
        growing, tensor = self.growing(name), self.walk.program.tensor[name]
        if not growing:
            return replace(WHOLE, lost=True)
        size = tensor.shape[growing[0]]
        lost = tensor.dtype.startswith("int") or not isinstance(size, Affine) or size.fixed != 0
        for source, state in zip(self.op.inputs, self.states, strict=True):
            if state.rows and self.shape(source) == self.shape(name):
                return State(rows=state.rows, lost=lost)
        return State(rows=Shard(growing[0]), lost=lost)


def numbers_are_values(step: Step) -> None:
    """Note where the number of a row in its batch is used as if it said something of it."""
    made = step.walk.program.tensor[step.op.outputs[0]].dtype
    algebra = step.facts.algebra
    keeps = step.facts.keeps_numbers or algebra == "rearrangement"
    keeps |= algebra == "cast" and made.startswith("int")
    if keeps or all(state.points is None for state in step.states):
        return
    step.blame("mixed")
    step.states = [
        replace(s, points=None, each=0, order=IN_ORDER if s.is_number else s.order)
        for s in step.states
    ]


def in_one_order(step: Step) -> None:
    """Note where rows meet that belong to different samples."""
    orders = {state.order for state in step.states if state.rows} - {ANY_ORDER}
    if len(orders) > 1:
        step.blame("mixed")
        step.states = [replace(s, order=IN_ORDER) if s.rows else s for s in step.states]
