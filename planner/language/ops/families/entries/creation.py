"""Ops that make a tensor from nothing or from a shape, and ops that draw random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.language.graph import Affine
from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, LocalForm, P, Placed, R
from planner.language.ops.families.images import by_sample
from planner.language.ops.kernel import (
    KernelCall,
    Saved,
    View,
    in_order_of_inputs,
    saves_indices_of_result,
    saves_nothing,
)
from planner.language.ops.letters import pointwise, same_dims
from planner.language.ops.record import (
    OWN_RANDOM_STREAM,
    OpFamily,
    ShardRule,
    aten,
    register,
)
from planner.language.ops.samples.state import ANY_ORDER, IN_ORDER, WHOLE, State
from planner.language.ops.samples.step import Across, Handler, Step


def constant(call: Call) -> Iterator[OpSharding]:
    """Equal entries: any dim can be sharded, each rank makes less."""
    for dim in range(len(call.outputs[0])):
        yield OpSharding(inputs=(R,) * len(call.inputs), outputs=(Shard(dim),))


def constant_on_shard(placed: Placed) -> LocalForm:
    """The same op with the sizes of the shard."""
    args = (placed.local_output(), *placed.op.args[1:])
    return placed.with_args(*args, kwargs=placed.op.kwargs)


def constant_like_on_shard(placed: Placed) -> LocalForm:
    """The same op with the sizes of the shard."""
    args = (placed.op.args[0], placed.local_output(), *placed.op.args[2:])
    return placed.with_args(*args, kwargs=placed.op.kwargs)


def feature_dropout(call: Call) -> Iterator[OpSharding]:
    """Input [n, c, …]: whole channels of a sample are dropped, so shards hold whole ones."""
    fixed = range(2, len(call.inputs[0])) if _draws(call) else ()
    yield from same_dims(call, fixed=fixed)
    if not _draws(call):
        yield OpSharding(inputs=(P,), outputs=(P,))


def dropout(call: Call) -> Iterator[OpSharding]:
    """Masks are equal on replicas and independent on shards."""
    yield from pointwise(call)
    if not _draws(call):
        # (A mask that is returned beside has ones.)
        yield OpSharding(inputs=(P,), outputs=(P, *(R for _ in call.outputs[1:])))


def dropout_on_shard(placed: Placed) -> LocalForm:
    """Drawn from the rank's own stream of random numbers, so shards differ."""
    if not _draws(placed.call) or not isinstance(placed.sharding.outputs[0], Shard):
        return LocalForm((placed.op,))
    return own_stream(placed)


def own_stream(placed: Placed) -> LocalForm:
    """Run the op unchanged but with random numbers that differ on each rank of the axis."""
    return placed.with_args(
        placed.op.target,
        placed.axis,
        *placed.op.args,
        target=OWN_RANDOM_STREAM,
        kwargs=placed.op.kwargs,
    )


def _draws(call: Call) -> bool:
    """Whether a dropout op draws a mask at all."""
    return _drop_probability(call) > 0


def _drop_probability(call: Call | KernelCall) -> float:
    """Return the probability of a dropout op, 0.0 when it is not in training mode."""
    train = call.arg(2, "train", True)
    # (None stands for training, which `native_dropout` takes.)
    return float(call.arg(1, "p", 0.5)) if train is None or train else 0.0


def _as_it_is(call: KernelCall, position: int) -> View | None:
    """What drops nothing hands its input on."""
    (source, *_) = call.op.inputs
    return None if _drop_probability(call) else View(source, call.strides[source])


def saves_mask(call: KernelCall) -> Saved:
    """The mask: on the CPU the noise in the input's dtype, on a GPU one byte an entry."""
    source = call.op.inputs[0]
    if _drop_probability(call) == 0.0:
        return Saved()
    element = call.element_bytes(source) if call.device_type == "cpu" else 1
    return Saved(extra_bytes=call.numel(source) * element)


def like(call: Call) -> Iterator[OpSharding]:
    """Takes only the shape of its input."""
    yield from pointwise(call)


# ---------------------------------------------------------------------------------------- samples


def filled(value_at: int) -> Handler:
    """Equal entries; a number among them, the argument at a place, may be that of samples."""

    def handler(step: Step) -> tuple[State, ...]:
        if isinstance(step.arg(value_at, "fill_value", 0), Affine):
            step.blame("size")
        growing = step.growing(step.op.outputs[0])
        if not growing:
            return (WHOLE,)
        return (State(rows=Shard(growing[0]), order=ANY_ORDER, equal=True),)

    return handler


def arange(step: Step) -> tuple[State, ...] | None:
    """Numbers of rows, where there are as many as samples have."""
    if not step.growing(step.op.outputs[0]):
        return None
    bounds = step.op.args
    start = 0 if step.op.target.endswith("default") else bounds[0]
    stride = bounds[2] if step.op.target.endswith("start_step") and len(bounds) > 2 else 1
    rows, each = Shard(0), step.each(step.op.outputs[0], 0)
    if start != 0 or type(stride) is not int or not each:
        step.blame("mixed")
        return (State(rows=rows),)
    if stride == 1:
        return (State(rows=rows, order=ANY_ORDER, points=ANY_ORDER, each=each),)
    return (State(rows=rows, points=IN_ORDER, each=each * stride),)


def shuffled(step: Step) -> tuple[State, ...] | None:
    """Numbers of rows in an order of their own."""
    each = step.each(step.op.outputs[0], 0)
    order = step.op.name
    return (State(rows=Shard(0), order=order, points=IN_ORDER, each=each),) if each else None


def drawn(step: Step) -> tuple[State, ...] | None:
    """Numbers drawn for each sample."""
    growing = [step.growing(name) for name in step.op.outputs]
    if step.op.inputs or not any(growing):
        return None
    return tuple(State(rows=Shard(dims[0])) for dims in growing)


# ---------------------------------------------------------------------------------------- records

_FILLED = Across(sizes_only=True, handlers=(filled(1),))

register(
    OpFamily(
        name="constant of a size",
        targets=aten("full zeros ones empty"),
        shard=(ShardRule(constant),),
        local_form=constant_on_shard,
        saved=saves_nothing,
        across=_FILLED,
    )
)
register(
    OpFamily(
        name="constant of a size, beside a tensor",
        targets=aten("new_zeros new_ones new_full new_empty"),
        shard=(ShardRule(constant),),
        local_form=constant_like_on_shard,
        saved=saves_nothing,
        across=Across(sizes_only=True, handlers=(filled(2),)),
    )
)
register(
    OpFamily(
        name="constant of a tensor's size",
        targets=aten("zeros_like ones_like full_like empty_like"),
        shard=(ShardRule(like),),
        saved=saves_nothing,
        across=_FILLED,
    )
)
register(
    OpFamily(
        name="a number",
        targets=aten("scalar_tensor"),
        across=Across(sizes_only=True, handlers=(filled(0),)),
    )
)
register(
    OpFamily(
        name="numbers in order",
        targets=aten("arange"),
        across=Across(sizes_only=True, handlers=(arange,)),
    )
)
register(
    OpFamily(
        name="other numbers in order",
        targets=aten("eye linspace"),
        across=Across(sizes_only=True),
    )
)

_DROPOUT = OpFamily(
    name="dropout",
    targets=aten("dropout"),
    shard=(ShardRule(dropout),),
    local_form=dropout_on_shard,
    flop_per_element=2,
    elements_alone=True,
    view=_as_it_is,
    result=in_order_of_inputs,
    saved=saves_mask,
    random=True,
)
register(_DROPOUT)
register(replace(_DROPOUT, name="dropout of single entries", targets=aten("alpha_dropout")))
register(
    replace(
        _DROPOUT,
        name="dropout that returns its mask",
        targets=aten("native_dropout"),
        view=None,
        saved=saves_indices_of_result,
    )
)
register(
    replace(
        _DROPOUT,
        name="dropout of channels",
        targets=aten("feature_dropout"),
        shard=(ShardRule(feature_dropout),),
    )
)
register(
    replace(
        _DROPOUT,
        name="other dropout",
        targets=aten("feature_alpha_dropout _fused_dropout"),
        shard=(),
        local_form=None,
    )
)

register(
    OpFamily(
        name="random numbers of a tensor's size",
        targets=aten(
            "rand_like randn_like randint_like bernoulli exponential uniform normal"
            " normal_functional log_normal cauchy geometric random poisson rrelu rrelu_with_noise"
        ),
        random=True,
        across=Across(rule=like, handlers=(drawn,)),
    )
)
register(
    OpFamily(
        name="random numbers of a size",
        targets=aten("randint"),
        random=True,
        across=Across(sizes_only=True, handlers=(drawn,)),
    )
)
register(
    OpFamily(
        name="numbers in random order",
        targets=aten("randperm"),
        random=True,
        across=Across(sizes_only=True, handlers=(shuffled,)),
    )
)
register(
    OpFamily(
        name="random numbers by rows",
        targets=aten("multinomial"),
        random=True,
        across=Across(rule=by_sample),
    )
)
register(
    OpFamily(
        name="other random numbers",
        targets=(
            *aten("binomial _sample_dirichlet _standard_gamma"),
            "aten.rand*",
            "aten.normal*",
            "aten.bernoulli*",
            "aten.rrelu*",
        ),
        random=True,
        across=Across(handlers=(drawn,)),
    )
)
