"""The axes of a mesh, as data: what each divides, what its ranks exchange, where it may lie.

The ranks of a pipeline stage form a box with one side for each axis of `AXES`. The order is
that of the network: ranks along the last axis are neighbours, ranks along the first are the
farthest apart.

    axis  a rank has a part of   its ranks exchange                      when
    rp    the samples            sums of ZeRO's shards of gradients      once a step
    dp    the samples            gradients (sum)                         once a step
    cp    every sequence         gradients (sum)                         once a step
                                 keys and values, or queries and heads   inside blocks
    hp    every sequence         gradients (sum)                         once a step
                                 queries and heads                       inside blocks
    tp    parameters and heads   activations (gathers, sums, scatters)   inside blocks

    rank = ((((pp_rank * rp + rp_rank) * dp + dp_rank) * cp + cp_rank) * hp + hp_rank) * tp
           + tp_rank                                              (sizes rp, dp, cp, hp, tp)

Sequences are cut on two levels: by all ranks of hp and cp between blocks; inside attention each
rank of hp has some heads of what these ranks have together, and only then cp gathers keys and
values, or passes them on, of those heads (Fang and Zhao 2024, arXiv 2405.07719). So neighbours
exchange all heads at once, and farther ranks hp times less.

Two properties of an axis decide how everything else treats it:

- `cuts_batch`: its ranks take different samples. No program changes. Along any other axis all
  ranks take the same samples, and the program of each block is lowered on the axis: every op
  runs on shards or on whole tensors as the axis' layouts (`ClassLayout`) say.
- `whole_params`: its ranks all hold every parameter. Then gradients are summed over the axis,
  and ZeRO shards over it, unless it `copies_shards`: its ranks then hold the same shards (HSDP;
  Zhao et al. 2023, arXiv 2304.11277, section 3.2.2), and no weights are gathered over its links.
  Along any other axis a parameter lies as the layouts say.

Code loops over axes by these properties (`batch_axes`, `lowered_axes`, `data_axes`) and does not
name an axis. `docs/contributing.md` tells how to add an axis. The pipeline (pp, vpp) is not
an axis of this table: it divides the list of blocks and has a schedule.

Experts lie on a second mesh of the same ranks (`FOLDED`; parallel folding, Liu et al. 2025, arXiv
2504.14960): a stage's ranks in order, dealt to etp, then to ep, and the rest hold the same.

    etp   an expert's matrices   rows and terms of sums                  inside blocks
    ep    the experts            rows that a router sends to them        inside blocks

With tp 2, cp 1, dp 4 (8 ranks) and ep 4, etp 1, ranks 0 to 3 share the experts, and 4 to 7 again.
What is left of the ranks, "expert data", has the same experts: gradients are summed over these once
a step, and ZeRO shards over "expert shards", its inner side, with "expert copies" as above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, prod

from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.layout.placement import Placement, Replicate, Shard
from planner.language.layout.sequences import SEQUENCE_DIM, check_hands_on_sequences, most_parts


def _any_model(graph: ModelGraph, axis: str, size: int) -> None:
    """The check of an axis on which every model can be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a mesh. Raises LayoutError where its properties contradict each other."""

    name: str
    """As in plans, on the command line and in messages: two or three letters."""
    divides: str
    """What each of its ranks has a part of, in words."""
    cuts_batch: bool
    """Whether its ranks take different samples of a microbatch. If not, blocks are lowered on it.
    Random numbers (dropout) differ between ranks with different samples and nowhere else: what
    an op draws on shards is a stream of its own that follows from the common one."""
    whole_params: bool
    """Whether each of its ranks holds all parameters. If so, gradients are summed over the axis
    once a step (with ZeRO 2 and 3 once a microbatch), and ZeRO shards over it."""
    copies_shards: bool = False
    """Whether its ranks hold the same shards under ZeRO, which else shards over them."""
    boundary: Placement = field(default_factory=Replicate)
    """Where blocks are lowered on it: how blocks hand on activations whose sizes divide, in a
    plan made without a search."""
    check: Callable[[ModelGraph, str, int], None] = _any_model
    """Raises LayoutError where a model can't be divided over it; takes graph, axis name, size."""
    own_by_stage: bool = False
    """Whether stages may have sizes of their own on it. The axis that `takes_rest` makes up for
    the difference, since all stages have the same number of ranks."""
    takes_rest: bool = False
    """Whether it gets the ranks that a stage's own sizes leave; true for one axis."""
    by_heads: bool = False
    """Whether attention is divided by heads along it, whatever is asked for along other axes."""
    searched: bool = False
    """Whether a search tries sizes of it on its own; else it is 1 unless its size is given."""
    within_node: bool = False
    """Whether such sizes keep its groups inside a node: its collectives are in every block."""
    between_nodes: bool = False
    """Whether such sizes are tried only where devices span nodes: over links of one kind they bring
    nothing."""
    most: Callable[[ModelGraph], int] | None = None
    """The largest of such sizes for a model; None for any."""
    is_quiet: bool = False
    """Whether files and messages name it only where its size is above 1."""
    in_every_file: bool = False
    """Whether every plan file names it. A file older than an axis does not: the size is then 1."""

    @property
    def cuts_sequences(self) -> bool:
        """Whether blocks hand on what it cuts, so that each rank works on positions of its own."""
        return isinstance(self.boundary, Shard)

    def __post_init__(self) -> None:
        """Check that samples are cut only between ranks that can all train on any of them."""
        if self.cuts_batch and not self.whole_params:
            raise LayoutError(
                f"axis {self.name} cuts the batch, so each of its ranks needs all parameters; "
                "set whole_params, or lower blocks on it instead"
            )
        if self.copies_shards and not self.whole_params:
            raise LayoutError(
                f"axis {self.name} copies shards, so each of its ranks needs all parameters; set "
                "whole_params"
            )


AXES: tuple[Axis, ...] = (
    Axis(
        name="rp",
        divides="samples of a microbatch, between copies of ZeRO's shards",
        cuts_batch=True,
        whole_params=True,
        copies_shards=True,
        searched=True,
        between_nodes=True,
        is_quiet=True,
    ),
    Axis(
        name="dp",
        divides="samples of a microbatch",
        cuts_batch=True,
        whole_params=True,
        takes_rest=True,
        searched=True,
        in_every_file=True,
    ),
    Axis(
        name="cp",
        divides="sequences",
        cuts_batch=False,
        whole_params=True,
        boundary=Shard(SEQUENCE_DIM),
        check=check_hands_on_sequences,
        searched=True,
        most=most_parts,
    ),
    Axis(
        name="hp",
        divides="sequences between blocks, and heads inside attention",
        cuts_batch=False,
        whole_params=True,
        boundary=Shard(SEQUENCE_DIM),
        by_heads=True,
        check=check_hands_on_sequences,
        searched=True,
        within_node=True,
        between_nodes=True,
        most=most_parts,
        is_quiet=True,
    ),
    Axis(
        name="tp",
        divides="parameters, heads and hidden sizes",
        cuts_batch=False,
        whole_params=False,
        own_by_stage=True,
        searched=True,
        within_node=True,
        in_every_file=True,
    ),
)
"""All axes, outermost first. Read it through the functions below: `register_axis` replaces it."""


def register_axis(axis: Axis, *, outside: str) -> None:
    """Add an axis whose ranks are farther apart than those of the axis `outside`.

    Every process of a run registers it before it reads a plan. Raises LayoutError when the name
    is taken, since a plan's sizes would then change their meaning.
    """
    global AXES
    if axis.name in axis_names() or axis.name in (*JOINT, "pp", "vpp"):
        raise LayoutError(f"axis {axis.name!r} is there already; choose another name")
    place = axis_names().index(find_axis(outside).name)
    AXES = (*AXES[:place], axis, *AXES[place:])


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAxis:
    """An axis of the experts' mesh. Its ranks are those of the other axes: its size adds none."""

    name: str
    """As in plans and messages."""
    divides: str
    """What each of its ranks has a part of, in words."""


FOLDED: tuple[FoldedAxis, ...] = (
    FoldedAxis(name="ep", divides="experts"),
    FoldedAxis(name="etp", divides="matrices of each expert, by the layouts of tp"),
)
"""The axes of the experts' mesh, outermost first."""


EXPERT_COPIES, EXPERT_SHARDS = "expert copies", "expert shards"
"""The two sides of the ranks with the same experts, outermost first: those with the same shards of
them under ZeRO, and those that it shards over."""


def copies_of_experts(copies: int, expert_replicas: int) -> int:
    """Return how many of the ranks with the same experts have the same shards of them, where so
    many `copies` have those of other parameters.
    """
    return gcd(copies, expert_replicas)


EXPERTS_MESH = (EXPERT_COPIES, EXPERT_SHARDS, *(axis.name for axis in FOLDED))
"""The sides of the experts' mesh, outermost first."""


def degree_names() -> tuple[str, ...]:
    """Return the names of all sizes that `Degrees` have: of the mesh, and of the experts' mesh."""
    return (*axis_names(), *(axis.name for axis in FOLDED))


def find_axis(name: str) -> Axis:
    """Return an axis by name; raise LayoutError naming those there are."""
    for axis in AXES:
        if axis.name == name:
            return axis
    raise LayoutError(f"mesh axis {name!r} is unknown; axes are {', '.join(axis_names())}")


def axis_names() -> tuple[str, ...]:
    """Return the names of all axes, outermost first."""
    return tuple(axis.name for axis in AXES)


def batch_axes() -> tuple[Axis, ...]:
    """Return the axes that cut the batch, outermost first."""
    return tuple(axis for axis in AXES if axis.cuts_batch)


def data_axes() -> tuple[Axis, ...]:
    """Return the axes over which gradients are summed, outermost first."""
    return tuple(axis for axis in AXES if axis.whole_params)


def shard_axes() -> tuple[Axis, ...]:
    """Return those of them that ZeRO shards over, outermost first."""
    return tuple(axis for axis in data_axes() if not axis.copies_shards)


def copy_axes() -> tuple[Axis, ...]:
    """Return those of them whose ranks hold the same shards, outermost first."""
    return tuple(axis for axis in data_axes() if axis.copies_shards)


def lowered_axes() -> tuple[Axis, ...]:
    """Return the axes that blocks are lowered on, innermost first.

    That is the order of lowering: where two axes cut one dim of a tensor, the inner axis cuts the
    coarse pieces and the outer axis cuts each of those.
    """
    return tuple(axis for axis in reversed(AXES) if not axis.cuts_batch)


def split_axes() -> tuple[Axis, ...]:
    """Return the axes along which ranks hold pieces of parameters, innermost first."""
    return tuple(axis for axis in reversed(AXES) if not axis.whole_params)


def own_axes() -> tuple[Axis, ...]:
    """Return the axes on which stages may have sizes of their own, outermost first."""
    return tuple(axis for axis in AXES if axis.own_by_stage)


def rest_axis() -> Axis:
    """Return the axis that gets the ranks which a stage's own sizes leave."""
    (axis,) = (axis for axis in AXES if axis.takes_rest)
    return axis


JOINT: dict[str, Callable[[], tuple[Axis, ...]]] = {
    "batch": batch_axes,
    "data": data_axes,
    "shards": shard_axes,
    "copies": copy_axes,
}
"""Names of several axes together: "batch" numbers the parts of a microbatch, "data" the ranks with
the same parameters (gradients are summed over these), "shards" those of them that ZeRO shards over,
and "copies" those with the same shards."""


EXPERT_DATA = "expert data"
"""The name of the ranks with the same experts, as "data" is of those with the same parameters."""


def members(name: str) -> tuple[str, ...]:
    """Return the names of the axes that a joint name stands for, or the name itself."""
    if name == EXPERT_DATA:
        return EXPERT_COPIES, EXPERT_SHARDS
    return tuple(axis.name for axis in JOINT[name]()) if name in JOINT else (name,)


OwnSizes = tuple[tuple[str, int], ...]
"""Sizes on axes where a stage differs from its plan, as (axis, size)."""


class Degrees(Mapping[str, int]):
    """The size of a mesh along every axis: ``Degrees(dp=2, tp=4)["tp"]``; 1 where not given.

    Sizes on the experts' mesh (`FOLDED`) are read by name, too; a loop over the axes does not meet
    them, since they add no ranks. Frozen and hashable; two are equal where all sizes are. Raises
    LayoutError for an unknown axis.
    """

    __slots__ = ("_folded", "_hash", "_joint", "_sizes")

    def __init__(self, **sizes: int) -> None:
        names = axis_names()
        folded = tuple(axis.name for axis in FOLDED)
        if unknown := sizes.keys() - {*names, *folded}:
            find_axis(min(unknown))  # raises
        self._sizes = {name: sizes.get(name, 1) for name in names}
        self._folded = {name: sizes.get(name, 1) for name in folded}
        self._joint = {name: prod(self._sizes[a] for a in members(name)) for name in JOINT}
        self._hash = hash((*self._sizes.items(), *self._folded.items()))

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis] if axis in self._sizes else self._folded[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Degrees) and (
            self._sizes == other._sizes and self._folded == other._folded
        )

    def __repr__(self) -> str:
        return f"Degrees({str(self).replace(' ', ', ')})"

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())

    def __reduce__(self) -> tuple[Callable[[dict[str, int]], Degrees], tuple[dict[str, int]]]:
        # Not the hash: text hashes differently in every process.
        return _unpickled, (self.sizes,)

    @property
    def sizes(self) -> dict[str, int]:
        """Every size by name; of quiet axes and the experts' mesh those above 1."""
        told = {axis.name for axis in AXES if not axis.is_quiet}
        sizes = self._sizes | self._folded
        return {name: size for name, size in sizes.items() if size > 1 or name in told}

    @property
    def expert_parts(self) -> int:
        """Parts that the experts' mesh cuts all experts of a block into."""
        return prod(self._folded.values())

    @property
    def expert_replicas(self) -> int:
        """Ranks with the same experts."""
        return self.num_ranks // self.expert_parts

    @property
    def experts_mesh(self) -> dict[str, int]:
        """The sides of the experts' mesh by name, outermost first (`EXPERTS_MESH`)."""
        copies = copies_of_experts(self.along("copies"), self.expert_replicas)
        return {
            EXPERT_COPIES: copies,
            EXPERT_SHARDS: self.expert_replicas // copies,
            **self._folded,
        }

    @property
    def num_ranks(self) -> int:
        """The ranks of the whole mesh."""
        return prod(self._sizes.values())

    def along(self, name: str) -> int:
        """Return the number of ranks along an axis, or along several (`JOINT`)."""
        return self._joint[name] if name in self._joint else self._sizes[name]

    def with_sizes(self, **sizes: int) -> Degrees:
        """Return a mesh with some sizes changed."""
        return Degrees(**{**self._sizes, **self._folded, **sizes})

    def with_own(self, own: OwnSizes) -> Degrees:
        """Return a mesh of as many ranks with a stage's own sizes; one axis takes the rest.

        Raises LayoutError where the own sizes do not divide the ranks.
        """
        return _with_own(self, own) if own else self


def check_experts_mesh(degrees: Degrees) -> None:
    """Raise LayoutError where the ranks of a stage have no experts' mesh of these sizes."""
    ep, etp = degrees["ep"], degrees["etp"]
    if etp not in (1, degrees["tp"]):
        raise LayoutError(f"etp={etp} was given and tp={degrees['tp']}; use etp=1 or etp=tp")
    if degrees.num_ranks % degrees.expert_parts:
        raise LayoutError(
            f"ep={ep} * etp={etp} does not divide the {degrees.num_ranks} ranks of a stage "
            f"({degrees}); use a divisor"
        )


@lru_cache(maxsize=1024)  # estimates of plans whose stages have sizes of their own call it often
def _with_own(degrees: Degrees, own: OwnSizes) -> Degrees:
    rest = rest_axis().name
    sizes = {**degrees, **dict(own), rest: 1}
    # All stages have as many ranks: what the own sizes leave goes to the axis that takes the rest.
    sizes[rest], left = divmod(degrees.num_ranks, prod(sizes.values()))
    sizes = {**degrees.sizes, **sizes}
    if left:
        given = " ".join(f"{name}={size}" for name, size in own)
        raise LayoutError(
            f"{given} does not divide the {degrees.num_ranks} ranks of a stage; use sizes whose "
            "product does"
        )
    return Degrees(**sizes)


def _unpickled(sizes: dict[str, int]) -> Degrees:
    return Degrees(**sizes)
