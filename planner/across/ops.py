"""What each op does to the samples of its tensors, and where it computes across them.

Most of it follows from the sharding rules: a rule by which shards of the inputs, each alone,
give shards of the outputs says that samples stay apart; one by which they give terms of a sum
says that they are summed. What rules do not say is here: sums that are divided by the number
of samples, constants of every sample, writes to buffers; rows in another order are in `order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planner.across.state import ANY_ORDER, IN_ORDER, WHOLE, State
from planner.graph import Affine, Arg, Op, Program, Ref, Size, TensorMeta
from planner.layout.placement import OpSharding, Partial, Placement, Replicate, Shard
from planner.ops.call import Call, fits
from planner.ops.record import Across, family_of, is_random, mutates
from planner.ops.registry import apart_strategies_of, has_rule, without_names

Kind = Literal["mixed", "pairs", "normaliser", "sum", "size", "buffer", "repeated", "unknown"]

BOUND = 2 * 1009
"""The microbatch size rules are asked at: even, and no size that a model has of its own."""

AXIS = 2
NONE, MEAN = 0, 1
"""ATen's numbers for a loss's `reduction`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One place where samples meet: the op to blame, and the op where it matters."""

    kind: Kind
    op: str
    used_by: str


@dataclass(kw_only=True)
class Walk:
    """One pass over a program. Mutable: states and faults grow."""

    program: Program
    states: dict[str, State]
    bound: Mapping[str, TensorMeta] = field(init=False)
    maker: dict[str, Op] = field(init=False)
    users: dict[str, list[Op]] = field(init=False)
    written: set[str] = field(init=False)
    faults: dict[Fault, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bound = self.program.bind(BOUND).tensor
        self.maker = {name: op for op in self.program.ops for name in op.outputs}
        self.users = {}
        self.written = {op.inputs[0] for op in self.program.ops if mutates(op)}
        for op in self.program.ops:
            for name in dict.fromkeys(op.inputs):
                self.users.setdefault(name, []).append(op)
            if self.written.intersection(op.inputs):
                self.written.update(op.outputs)  # what follows from buffers that are written

    def run(self) -> None:
        """Follow the samples through every op in order."""
        for op in self.program.ops:
            step = Step(walk=self, op=op, states=[self.states[n] for n in op.inputs])
            self.states.update(zip(op.outputs, _follow(step), strict=True))


@dataclass(slots=True, kw_only=True)
class Step:
    """One op with the states of its inputs. Mutable: a fault makes states simpler."""

    walk: Walk
    op: Op
    states: list[State]

    @property
    def packet(self) -> str:
        """The op's name without its overload."""
        return self.op.target.rpartition(".")[0]

    @property
    def facts(self) -> Across:
        """What the op's record says of samples."""
        return family_of(self.op.target).across

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
        return [d for d, s in enumerate(self.shape(name)) if isinstance(s, Affine) and s.per_sample]

    def each(self, name: str, dim: int) -> int:
        """Return how many rows of a tensor's dim a sample has."""
        size = self.shape(name)[dim]
        return size.per_sample if isinstance(size, Affine) and size.fixed == 0 else 0

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
                self.walk.faults[Fault(kind=kind, op=cause, used_by=self.op.name)] = None

    def blame_sums(self) -> None:
        """Note that sums over samples are used otherwise than as terms of the loss."""
        causes = dict.fromkeys(c for state in self.states for c in (*state.sums, *state.shares))
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


Handler = Callable[[Step], tuple[State, ...] | None]
"""What an op leaves of its inputs' states; None where the rules are to say."""

_HANDLERS: dict[str, list[Handler]] = {}


def handles(*packets: str) -> Callable[[Handler], Handler]:
    """Register a handler for op packets, of ATen where they name no library."""

    def register(handler: Handler) -> Handler:
        for packet in packets:
            _HANDLERS.setdefault(packet if "." in packet else f"aten.{packet}", []).append(handler)
        return handler

    return register


def _follow(step: Step) -> tuple[State, ...]:
    op = step.op
    if step.compares(op.outputs) and not step.compares(op.inputs):
        step.blame("pairs")
        return step.anything()
    if mutates(op) and step.packet != "aten.batch_norm":
        return _write(step)
    for handler in _HANDLERS.get(step.packet, ()):
        found = handler(step)
        if found is not None:
            return found
    return _by_rules(step)


# ------------------------------------------------------------------------------- by rules


def _by_rules(step: Step) -> tuple[State, ...]:
    """Return what the rules say of an op, noting what they and the states do not allow."""
    op = step.op
    if not any(s.rows or s.sums or s.power for s in step.states) and not _grows(step):
        lost = any(state.lost for state in step.states)
        return (replace(WHOLE, lost=lost),) * len(op.outputs)
    numbers_are_values(step)
    in_one_order(step)
    if any(state.bounded for state in step.states):
        if step.facts.algebra == "rearrangement" or step.packet == "aten.to":
            return (step.states[0],) * len(op.outputs)
        step.blame_sums()
    found = _match(step)
    if found is None and any(state.sums for state in step.states):
        affine = _sum_and_constant(step)
        if affine is not None:
            return affine
        step.blame_sums()
        found = _match(step)
    if found is not None:
        power = _power(step)
        return tuple(
            _outcome(step, placement, power, name)
            for placement, name in zip(found.outputs, op.outputs, strict=True)
        )
    if any(state.rows for state in step.states):
        is_known = has_rule(op.target) or step.facts.rule is not None
        step.blame("mixed" if is_known else "unknown")
    elif any(map(step.growing, op.outputs)):
        step.blame("unknown")
    return step.anything()


def _grows(step: Step) -> bool:
    """Whether sizes or numbers of an op without samples depend on how many there are."""
    return any(map(step.growing, step.op.outputs)) or bool(_batch_sizes(step))


def _batch_sizes(step: Step) -> list[Affine]:
    if step.facts.sizes_only:
        return []
    values = (*step.op.args, *(value for _, value in step.op.kwargs))
    return [value for value in values if isinstance(value, Affine)]


def _match(step: Step) -> OpSharding | None:
    """The sharding that takes each input as its samples lie, and no other tensor in parts."""
    op = step.op
    if _truncates(step):
        return None
    keeps = step.facts.in_runs
    counts = _segments(step)
    if len(counts) > 1 and not keeps:
        return None
    inputs = tuple(_placement(state, keeps) for state in step.states)
    sums = Partial() in inputs or step.facts.algebra == "sum"
    plain, metas = _without_names(step, whole_numbers_too=sums)
    offered = apart_strategies_of(plain, metas, AXIS, tuple(counts - {1}) if keeps else ())
    offered += _by_own_rule(step, Call(plain, {m.name: m for m in metas}, AXIS))
    fitting = [sharding for sharding in offered if sharding.inputs == inputs]
    growing = [step.growing(name) for name in op.outputs]
    if not any(growing) and all(isinstance(place, Replicate) for place in inputs):
        return OpSharding(inputs=inputs, outputs=(Replicate(),) * len(op.outputs))
    for sharding in fitting:
        places = zip(sharding.outputs, growing, strict=True)
        if all(
            place.dim in dims if isinstance(place, Shard) else not dims for place, dims in places
        ):
            return sharding
    return None


def _without_names(step: Step, *, whole_numbers_too: bool) -> tuple[Op, tuple[TensorMeta, ...]]:
    """The op as rules see it; they sum over ranks what can carry a gradient only."""
    plain, metas = without_names(step.op.bind(BOUND), step.walk.bound)
    if whole_numbers_too:
        whole = ("int", "uint", "bool")
        metas = tuple(
            replace(m, dtype="float32") if m.dtype.startswith(whole) else m for m in metas
        )
    return plain, metas


def _by_own_rule(step: Step, call: Call) -> tuple[OpSharding, ...]:
    """What the record says of samples alone, beside the sharding rules."""
    rule, shapes = step.facts.rule, (*call.inputs, *call.outputs)
    found = rule(call) if rule is not None else ()
    return tuple(s for s in found if fits((*s.inputs, *s.outputs), shapes, AXIS))


def _segments(step: Step) -> set[int]:
    """In how many runs the rows of the batch lie in their dim; equal rows lie in any."""
    return {
        s.rows.segments for s in step.states if s.rows and not (s.equal and s.order == ANY_ORDER)
    }


def _placement(state: State, keeps_segments: bool) -> Placement:
    if state.sums:
        return Partial()
    if state.rows is None:
        return Replicate()
    return state.rows if keeps_segments else Shard(state.rows.dim)


def _outcome(step: Step, placement: Placement, power: int, name: str) -> State:
    """What a tensor is that follows from the inputs under a sharding."""
    rows = [state for state in step.states if state.rows]
    equal = all(state.equal for state in rows) and not is_random(step.op)
    if isinstance(placement, Replicate):
        return State(power=power)
    if isinstance(placement, Partial):
        sums, shares = _union(step.states)
        if not rows:
            if power > 0 and _batch_sizes(step):
                sums = (step.op.name,)  # by which a mean has become a sum
            return State(sums=sums, shares=shares, power=power)
        power += 0 if _is_mean(step) else 1
        if equal:
            return State(power=power)
        return State(sums=(step.op.name,), shares=shares, power=power)
    if not step.facts.in_runs:
        placement = Shard(placement.dim, max(_segments(step), default=1))
    if not rows:
        return State(rows=placement, equal=True, power=power)
    orders = {state.order for state in rows}
    points = next((state.points for state in rows if state.points is not None), None)
    if points == ANY_ORDER and len(step.op.inputs) == 1:
        (source,) = step.op.inputs
        if _rows_in(step, source) != _rows_in(step, name):  # a number for each of several rows
            orders, points = {IN_ORDER}, IN_ORDER
    return State(
        rows=placement,
        order=next(iter(orders - {ANY_ORDER}), ANY_ORDER),
        points=points,
        each=max(state.each for state in rows),
        equal=equal,
        power=power,
        lost=any(s.lost for s in rows) and step.walk.program.tensor[name].dtype.startswith("int"),
    )


def _union(states: Iterable[State]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sums that tensors come from, and those they were divided by."""
    states = tuple(states)
    sums = dict.fromkeys(cause for state in states for cause in state.sums)
    return tuple(sums), tuple(dict.fromkeys(cause for s in states for cause in s.shares))


def _rows_in(step: Step, name: str) -> int:
    return step.walk.bound[name].numel_at(1)


def _is_mean(step: Step) -> bool:
    place = step.facts.reduction_arg
    if place is not None:
        return bool(step.arg(place, "reduction", MEAN) == MEAN)
    return step.packet in ("aten.mean", "aten.nanmean")


def _truncates(step: Step) -> bool:
    """Whether an op rounds what sums over samples: counts alone are whole numbers already."""
    if step.packet != "aten.to" or not step.states[0].sums:
        return False
    (source,), (made,) = step.op.inputs[:1], step.op.outputs
    tensor, maker = step.walk.program.tensor, step.walk.maker.get(source)
    becomes = tensor[made].dtype
    if becomes == "bool":
        return True
    counts = maker is not None and maker.target.startswith("aten.histc")
    is_float = tensor[source].dtype.startswith(("float", "bfloat"))
    return is_float and becomes.startswith(("int", "uint")) and not counts


def numbers_are_values(step: Step) -> None:
    """Note where the number of a row in its batch is used as if it said something of it."""
    made = step.walk.program.tensor[step.op.outputs[0]].dtype
    keeps = step.facts.algebra == "rearrangement" or step.packet == "aten.repeat_interleave"
    keeps |= step.packet == "aten.to" and made.startswith("int")
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


# ------------------------------------------------------------- factors of the batch's size


def _power(step: Step) -> int:
    """How the result grows with the number of samples, beside what its state says.

    Notes where a value that depends on their number is used otherwise than as a factor.
    """
    powers = [state.power for state in step.states]
    sizes = _batch_sizes(step)
    if not any(powers) and not sizes:
        return 0
    factor, algebra = 0, step.facts.algebra
    if algebra in ("product", "quotient") and all(size.fixed == 0 for size in sizes):
        factor, sizes = len(sizes), []
    if sizes:
        step.blame("size")
        return 0
    if algebra == "product":
        return sum(powers) + factor
    if algebra == "quotient" and step.arg(2, "rounding_mode") is None:
        first = isinstance(step.op.args[0], Ref)
        divisors = sum(powers[1:]) if first else sum(powers)
        return (powers[0] - divisors - factor) if first else factor - divisors
    is_sum = algebra == "addition" and len(step.states) > 1
    if len(set(powers)) == 1 and (is_sum or _is_linear(step)):
        return powers[0]
    if step.packet in ("aten.linear", "aten.where") and _is_linear(step):
        return max(powers, key=abs)
    step.blame("size")
    return 0


def _is_linear(step: Step) -> bool:
    """Whether an op is linear in the inputs that grow with the number of samples."""
    terms = tuple(Partial() if state.power else Replicate() for state in step.states)
    if len(step.op.inputs) == 1 and step.packet in ("aten.sum", "aten.mean", "aten.cumsum"):
        return True
    plain, metas = _without_names(step, whole_numbers_too=True)
    outputs = (Partial(),) * len(step.op.outputs)
    return OpSharding(inputs=terms, outputs=outputs) in apart_strategies_of(plain, metas, AXIS, ())


def _sum_and_constant(step: Step) -> tuple[State, ...] | None:
    """A mean over samples stays one when something is added that no sample changes.

    So does a sum up to that, which does no harm to a divisor: 1e-8 keeps it from zero.
    """
    if step.facts.algebra != "addition" or any(state.rows for state in step.states):
        return None
    sums = [state for state in step.states if state.sums]
    powers = {state.power for state in sums}
    if len(powers) > 1 or any(s.power for s in step.states if not s.sums) or _batch_sizes(step):
        return None
    causes, shares = _union(sums)
    return (State(sums=causes, shares=shares, power=max(powers), bounded=any(powers)),)


@handles("clamp", "clamp_min", "maximum")
def _kept_from_zero(step: Step) -> tuple[State, ...] | None:
    """A sum over samples that may become a divisor."""
    state = step.states[0]
    if not state.sums or any(other != WHOLE for other in step.states[1:]):
        return None
    return (replace(state, bounded=True),)


@handles("div", "divide", "true_divide")
def _quotient(step: Step) -> tuple[State, ...] | None:
    """A sum over samples divided by another is a mean over what the other counts."""
    if len(step.states) != 2 or not step.states[1].sums:
        return None
    above, below = step.states
    power = above.power - below.power
    shares = tuple(dict.fromkeys((*above.shares, *below.sums, *below.shares)))
    if above.sums and not above.bounded:
        return (replace(above, shares=shares, power=power),)
    if above.rows and above.points is None and _is_only_summed(step):
        return (replace(above, equal=False, shares=shares, power=power),)
    return None


def _is_only_summed(step: Step) -> bool:
    users = step.walk.users.get(step.op.outputs[0], [])
    sums = [u for u in users if u.target in ("aten.sum.default",)]
    return bool(users) and len(sums) == len(users)


@handles("cumsum", "sum", "mean", "flip", "roll")
def _sum_of_sum(step: Step) -> tuple[State, ...] | None:
    """Linear in a tensor that samples were summed to."""
    state = step.states[0]
    return (state,) if state.sums and not state.bounded else None


# ------------------------------------------------------------------------------ creation


@handles("full", "zeros", "ones", "empty", "scalar_tensor")
@handles("new_full", "new_zeros", "new_ones", "new_empty")
@handles("full_like", "zeros_like", "ones_like", "empty_like")
def _filled(step: Step) -> tuple[State, ...] | None:
    """Equal entries; a number among them may be that of samples."""
    (name,) = step.op.outputs
    value = step.arg(0 if step.packet == "aten.scalar_tensor" else 1, "fill_value", 0)
    if step.packet.startswith("aten.new_"):
        value = step.arg(2, "fill_value", 0)
    power = 0
    if isinstance(value, Affine):
        power = 1
        if value.fixed:
            step.blame("size")
            power = 0
    growing = step.growing(name)
    if not growing:
        return (State(power=power),)
    rows = Shard(growing[0])
    return (State(rows=rows, order=ANY_ORDER, equal=True, power=power),)


@handles("rand", "randn", "randint", "normal")
def _drawn(step: Step) -> tuple[State, ...] | None:
    """Numbers drawn for each sample."""
    growing = [step.growing(name) for name in step.op.outputs]
    if step.op.inputs or not any(growing):
        return None
    return tuple(State(rows=Shard(dims[0])) for dims in growing)


@handles("repeat", "tile")
def _repeat(step: Step) -> tuple[State, ...] | None:
    """One copy after the other: as often as there are samples, or of all samples."""
    state, (name,) = step.states[0], step.op.outputs
    growing, times = step.growing(name), step.op.args[1]
    assert isinstance(times, tuple)
    if state.sums or len(growing) != 1:
        return None
    (dim,) = growing
    count = times[dim]
    if state.rows is None:
        return (State(rows=Shard(dim), equal=True, power=state.power),)
    if type(count) is not int or state.is_number:
        return None
    rows = Shard(dim, state.rows.segments * count)
    return (replace(state, rows=rows),)


@handles("repeat_interleave")
def _repeat_each(step: Step) -> tuple[State, ...] | None:
    """Each entry as often as there are samples."""
    state = step.states[0]
    if state.rows or state.sums or not isinstance(step.arg(1, "repeats"), Affine):
        return None
    (dim,) = step.growing(step.op.outputs[0])
    size = step.walk.bound[step.op.inputs[0]].shape[dim]
    assert isinstance(size, int)
    return (State(rows=Shard(dim, size), equal=True, power=state.power),)


@handles("slice")
def _slice(step: Step) -> tuple[State, ...] | None:
    """Whole runs of the batch's samples, where their dim holds several; or one row of each."""
    state, call = step.states[0], step.call
    rank = len(call.inputs[0])
    dim = int(call.arg(1, "dim", 0)) % rank if rank else 0
    if state.rows is None or state.rows.dim != dim or call.inputs == call.outputs:
        return None
    size = call.inputs[0][dim]
    start, stop, _ = slice(call.arg(2, "start"), call.arg(3, "end")).indices(size)
    stride = call.arg(4, "step", 1)
    run = size // state.rows.segments
    if stride == 1:
        if start % run or stop % run:
            return None
        return (replace(state, rows=Shard(dim, (stop - start) // run)),)
    if start >= stride or stop != size or state.rows.segments > 1 or (size // BOUND) % stride:
        return None
    return (state,) if state.points is None else None


# -------------------------------------------------------------------- losses, statistics


@handles("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
def _class_loss(step: Step) -> tuple[State, ...] | None:
    """With class weights or probabilities, of which the sharding rules say nothing.

    A mean with class weights is divided by the weights of the targets that the batch has.
    """
    op, call = step.op, step.call
    logits, target = step.states[:2]
    weighted = isinstance(step.arg(2, "weight"), Ref)
    of_classes = call.is_floating(op.inputs[1])
    if not weighted and not of_classes:
        return None
    rank = len(call.inputs[0])
    class_dim = min(1, rank - 1)
    numbers_are_values(step)
    in_one_order(step)
    if any(s.sums or s.power for s in step.states) or logits.rows is None or target.rows is None:
        return None
    dim = logits.rows.dim
    of_target = dim if of_classes or dim < class_dim else dim - 1
    if dim == class_dim or target.rows != Shard(of_target, logits.rows.segments):
        return None
    reduction = step.arg(3, "reduction", MEAN)
    if reduction == NONE:
        return (State(rows=Shard(dim if dim < class_dim else dim - 1), order=logits.order),)
    shares = (op.name,) if reduction == MEAN and weighted and not of_classes else ()
    return (State(sums=(op.name,), shares=shares, power=0 if reduction == MEAN else 1),)


@handles("view_as")
def _like_another(step: Step) -> tuple[State, ...] | None:
    """Of the second tensor only the shape is taken, which the first has room for."""
    step.states[1] = WHOLE
    return None


@handles("embedding_bag", "_embedding_bag")
def _bags(step: Step) -> tuple[State, ...] | None:
    """Table, numbers of all bags in a row, where each bag begins: a row for each bag."""
    table, numbers, begins = step.states[:3]
    starts_in_rows = begins.points == IN_ORDER and begins.order == IN_ORDER
    starts_in_rows &= begins.each == step.each(step.op.inputs[1], 0)
    if table != WHOLE or numbers.rows != Shard(0) or numbers.order or not starts_in_rows:
        return None
    growing = [step.growing(name) for name in step.op.outputs]
    return tuple(State(rows=Shard(dims[0])) if dims else WHOLE for dims in growing)


@handles("batch_norm")
def _batch_norm(step: Step) -> tuple[State, ...] | None:
    """In training it computes across samples, of which `planner.plan.batch_statistics` tells."""
    if not step.arg(5, "training", True):
        return None
    step.blame_sums()
    return (replace(step.states[0], points=None, equal=False, order=IN_ORDER),)


@handles("instance_norm")
def _instance_norm(step: Step) -> tuple[State, ...] | None:
    """Running statistics are means over samples, written to buffers."""
    if step.arg(3, "running_mean") is None or not step.arg(5, "use_input_stats", True):
        return None
    step.blame("buffer")
    return (replace(step.states[0], equal=False),)


def _write(step: Step) -> tuple[State, ...]:
    """A buffer written: from samples, or once for each part of the batch."""
    op = step.op
    if any(state != WHOLE for state in step.states[1:]) or _batch_sizes(step):
        step.blame("buffer")
    elif not _is_counter(step) and not _sets_the_same(step):
        step.blame("repeated")
    return (WHOLE,) * len(op.outputs)


def _is_counter(step: Step) -> bool:
    tensor = step.walk.program.tensor[step.op.inputs[0]]
    return len(step.op.inputs) == 1 and tensor.dtype.startswith("int") and not tensor.shape


def _sets_the_same(step: Step) -> bool:
    """Whether a buffer gets a value in which no buffer that is written has a part."""
    if step.packet in ("aten.zero_", "aten.fill_"):
        return True
    return step.packet == "aten.copy_" and not step.walk.written.intersection(step.op.inputs[1:])
