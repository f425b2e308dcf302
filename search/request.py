"""The request of a search and its result: plain frozen data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, cast, get_args

from costmodel.execution import find_execution
from costmodel.execution.dispatch.imbalance import Imbalance, check_imbalance, imbalance_of_step
from costmodel.uncertainty import EVEN_ODDS, USUAL_ODDS, usable_bytes
from planner.errors import LayoutError
from planner.language.layout.axes import find_axis
from planner.language.layout.class_layout import MOST
from planner.language.plan import OURS, RUNTIME_OF, Plan, Precision, precision_named
from planner.language.plan.accepted import check_accept
from planner.language.schedule import find_schedule
from profiles import Profile
from search.space.configuration import RECOMPUTE_CHOICES

SOLVERS = ("dp", "recursive", "ilp")
INEXACT_SOLVER = "recursive"
"""The value of its stage boundaries proves nothing."""
_NAMED = ("schedule", "recompute")
_SIZES = ("dp", "tp", "pp", "vpp", "cp", "hp", "rp", "ep", "microbatch_size")
CHOICES = (*_SIZES, "zero", *_NAMED)
"""What can be fixed, allowed or forbidden by value."""

Meshes = Literal["same", "own"]
Overlaps = Literal["none", "auto"]
Logits = Literal["auto", "whole", "chunked"]
Offload = Literal["auto", "none", "optimizer", "activations", "both", "tables"]

Value = TypeVar("Value")


LEAST_ODDS, MOST_ODDS = EVEN_ODDS, 0.99
"""Odds of fitting that may be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search for: devices, batch, memory, and the choices that are fixed.

    A choice that is None is searched; a given one is used exactly, never changed.
    """

    num_devices: int
    """All of them are used: rp * dp * cp * hp * tp * pp of the plan."""
    global_batch: int
    """Samples per step."""
    memory_limit_bytes: int | None = None
    """Of a device, that the estimate may take; None: what the profile says is usable."""
    memory_odds: float | None = None
    """Odds with which a plan must fit. None: `costmodel.uncertainty.USUAL_ODDS` of what the profile
    says is usable, and 0.5 of a limit that is given: the estimate itself fits it."""
    dp: int | None = None
    """Data-parallel degree."""
    tp: int | None = None
    """Tensor-parallel degree."""
    pp: int | None = None
    """Pipeline ranks."""
    vpp: int | None = None
    """Stages per pipeline rank."""
    cp: int | None = None
    """Context-parallel degree."""
    hp: int | None = None
    """Ranks inside each of its parts that exchange positions for heads in attention."""
    rp: int | None = None
    """Copies of ZeRO's shards: dp replicas shard, and so many times they are copied (HSDP)."""
    ep: int | None = None
    """Ranks that share the experts of a block; those of dp, cp and tp, so it adds none."""
    expert_imbalance: float | None = None
    """How unevenly routers deal rows to the ranks that share experts: standard deviation of the
    logarithm of a rank's rows, 0 where they are forced to be even. None: as recorded runs of the
    profile told, else as the runtime's record says."""
    microbatch_size: int | None = None
    """Samples per microbatch of a replica."""
    schedule: str | None = None
    """A name of `planner.language.schedule`. ``synthesised`` searches all of them, then makes a
    table of its own for the best few plans and uses it where it is faster."""
    zero: int | None = None
    """ZeRO stage, 0 to 3."""
    recompute: str | None = None
    """One of RECOMPUTE_CHOICES."""
    model_file: str = ""
    """Written into the plan as the place the model came from."""
    max_gap: float = 0.0
    """Stop when proved within this fraction of the best; the certificate says so."""
    time_limit_s: float | None = None
    """Stop after this time, with a plan or without; the certificate says so."""
    solver: str = "dp"
    """Searcher of stage boundaries: ``dp`` (exact for its recurrence), ``recursive`` (fast),
    ``ilp`` (a joint integer program of boundaries, meshes, recompute and memory). With ``ilp``
    integer programs place the ops of blocks, too; else variable elimination does."""
    forbid: tuple[tuple[str, str], ...] = ()
    """(choice, value) pairs that no plan may use."""
    allow: tuple[tuple[str, str], ...] = ()
    """(choice, value) pairs; of a choice named here, only these values are searched."""
    pins: tuple[tuple[int, str, str], ...] = ()
    """(class index, tensor name, placement) triples that every layout must respect."""
    precision: Precision = "model"
    """What the graph was captured in; not searched."""
    execution: str = OURS
    """The runtime that plans are priced for, or the system whose runtime it is; not searched. Plans
    for a system (`planner.language.stacks`) are those that can be written for it."""
    receive_ahead: int = 2
    """Jobs ahead of which receives are posted; not searched, copied into the plan."""
    clip_gradients: bool = False
    """Whether the step clips gradients by their norm; not searched."""
    accept: tuple[str, ...] = ()
    """What may differ from one process where a plan cuts a batch across which the model computes:
    names of `planner.language.plan.accepted`, copied into the plan."""
    balance: tuple[int, ...] = ()
    """Blocks of each stage, in order; empty: searched."""
    split_rank: int | None = None
    """The pp rank at which the decoder of an encoder-decoder model begins; those before it hold the
    encoder alone. None: stages may hold blocks of both."""
    offload: Offload = "auto"
    """What is in host memory; ``auto`` offloads only where nothing fits without."""
    meshes: Meshes = "same"
    """Whether all stages share one dp and tp, or each may have its own."""
    overlap: Overlaps = "none"
    """``auto`` chooses whether weight gradients are made beside collectives of input gradients
    (`Plan.overlap`), and in how many pieces rows are gathered beside products
    (`Plan.gather_pieces`); with ``none`` collectives are waited for at once."""
    logits: Logits = "auto"
    """Whether a loss has the logits of all tokens, ``whole``, or ``chunked``: of as many at a time
    as are worth it (`Plan.logit_rows`). ``auto`` is what makes the faster plan: chunks take longer,
    and with less memory another plan may fit. With `meshes` own, and on several kinds of devices,
    it is whole."""
    axes: tuple[tuple[str, int], ...] = ()
    """Sizes of mesh axes that have no field here, as (axis, size)."""
    num_best: int = 1
    """How many plans to find: the best, then the next best of other configurations."""

    @property
    def odds(self) -> float:
        """Odds with which a plan must fit."""
        if self.memory_odds is not None:
            return self.memory_odds
        return USUAL_ODDS if self.memory_limit_bytes is None else LEAST_ODDS

    def limit_bytes(self, profile: Profile) -> float:
        """Return the bytes of a device that an estimate may take."""
        limit = float(self.memory_limit_bytes or profile.memory_bytes)
        return usable_bytes(limit, profile, find_execution(self.execution), self.odds)

    def imbalance(self, profile: Profile) -> Imbalance:
        """Return how uneven routers are, with the odds that memory is counted for."""
        runtime = find_execution(self.execution)
        return imbalance_of_step(runtime, profile, given=self.expert_imbalance, odds=self.odds)

    def __post_init__(self) -> None:
        """Raise LayoutError when a number cannot mean anything, PlannerError when no runtime is
        called so.
        """
        # A system stands for its runtime, whose name plans and prices have.
        object.__setattr__(self, "execution", find_execution(self.execution).name)
        if self.num_devices < 1:
            raise LayoutError(
                f"`num_devices` {self.num_devices} was given; training needs at least one device, "
                "so use `num_devices` 1 or more"
            )
        if self.global_batch < 1:
            raise LayoutError(
                f"`global_batch` {self.global_batch} was given; a step needs at least one sample, "
                "so use `global_batch` 1 or more"
            )
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(
                    f"`{name}` {value} was given; it counts something, so it must be 1 or more, "
                    "or left out to be searched"
                )
        for name in ("num_devices", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value > MOST:
                raise LayoutError(f"`{name}` {value} was given; plans count to {MOST} of them")
        for axis, size in self.axes:
            if find_axis(axis).name in CHOICES or size < 1:
                raise LayoutError(
                    f"`axes` {axis}={size} was given; a size is 1 or more, and an axis that has "
                    "a field here is fixed by it"
                )
        if self.execution == RUNTIME_OF["graphs"]:
            if self.zero:
                raise LayoutError(
                    f"`zero` {self.zero} was given for CUDA graphs, which read parameters where "
                    "they were captured, and ZeRO gathers them elsewhere each time; use `zero` 0, "
                    "or compiled blocks without graphs"
                )
            object.__setattr__(self, "zero", 0)
        if self.zero not in (None, 0, 1, 2, 3):
            raise LayoutError(f"`zero` {self.zero} was given; ZeRO stages are 0, 1, 2 and 3")
        if self.recompute not in (None, *RECOMPUTE_CHOICES):
            raise LayoutError(
                f"`recompute` {self.recompute} was given; use {', '.join(RECOMPUTE_CHOICES[:-1])} "
                f"or {RECOMPUTE_CHOICES[-1]}"
            )
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise LayoutError(
                f"a memory limit of {self.memory_limit_bytes} bytes was given; it must be positive"
            )
        if self.memory_odds is not None and not LEAST_ODDS <= self.memory_odds <= MOST_ODDS:
            raise LayoutError(
                f"`memory_odds` {self.memory_odds} was given; use {LEAST_ODDS}, with which the "
                f"estimate itself fits, to {MOST_ODDS}"
            )
        check_imbalance(self.expert_imbalance)
        if self.offload not in get_args(Offload):
            raise LayoutError(
                f"`offload` {self.offload} was given; use {', '.join(get_args(Offload)[:-1])} or "
                f"{get_args(Offload)[-1]}, which say what the host's memory holds"
            )
        if self.meshes not in get_args(Meshes):
            raise LayoutError(
                f"`meshes` {self.meshes} was given; use same (one dp and tp for all stages) or own"
            )
        if self.overlap not in get_args(Overlaps):
            raise LayoutError(
                f"`overlap` {self.overlap} was given; use auto, which chooses whether weight "
                "gradients are made beside collectives of a backward, or none"
            )
        if self.overlap == "auto" and self.meshes == "own":
            raise LayoutError(
                "`overlap` auto was given with `meshes` own, whose stages would each choose; "
                "drop one of them"
            )
        if self.logits not in get_args(Logits):
            raise LayoutError(
                f"`logits` {self.logits} was given; use whole, chunked, or auto, which chooses"
            )
        if self.logits == "chunked" and self.meshes == "own":
            raise LayoutError(
                f"`logits` {self.logits} was given with `meshes` own, whose stages would each "
                "choose; drop one of them"
            )
        if self.overlap == "auto" and self.execution not in RUNTIME_OF.values():
            raise LayoutError(
                f"`overlap` auto was given with `execution` {self.execution}, which makes weight "
                "gradients in an order of its own, none of them beside collectives by choice; drop "
                f"it, or plan for {OURS}"
            )
        precision_named(self.precision)
        if self.num_best < 1:
            raise LayoutError(
                f"`num_best` {self.num_best} was given; it counts plans, so use 1 or more"
            )
        if self.receive_ahead < 0:
            raise LayoutError(
                f"`receive_ahead` {self.receive_ahead} was given; it counts jobs: 0 or more"
            )
        if self.solver not in SOLVERS:
            raise LayoutError(f"`solver` {self.solver} was given; use one of {', '.join(SOLVERS)}")
        if not 0 <= self.max_gap < 1:  # nor is nan
            raise LayoutError(
                f"`max_gap` {self.max_gap} was given; a gap is a part of the step time, 0 or "
                "more and below 1, such as 0.02"
            )

        check_accept(self.accept)
        for field_name in ("allow", "forbid"):
            for choice, value in getattr(self, field_name):
                _check_named_value(field_name, choice, value)
        for choice in CHOICES:
            fixed = getattr(self, choice)
            named = self.allowed(choice)
            if named and all((choice, value) in self.forbid for value in named):
                raise LayoutError(
                    f"`allow` and `forbid` both name {choice}={','.join(named)}, which leaves no "
                    f"{choice} to search; drop one of them"
                )
            if (choice, str(fixed)) in self.forbid:
                raise LayoutError(
                    f"`{choice}` {fixed} and `forbid` {choice}={fixed} were given; drop one of them"
                )
            if fixed is not None and named and str(fixed) not in named:
                raise LayoutError(
                    f"`{choice}` {fixed} was given and `allow` {choice} names {', '.join(named)} "
                    "only; drop one of them"
                )

    def values(self, choice: str, searched: Iterable[Value]) -> list[Value]:
        """Return what to try of a choice: the fixed value, those allowed, or all `searched`;
        without the forbidden ones. A fixed or allowed value need not be among `searched`.
        """
        fixed: Any = self.fixed(choice)
        tried: Iterable[Value] = searched if fixed is None else (fixed,)
        if fixed is None and (named := self.allowed(choice)):
            tried = [cast("Value", text if choice in _NAMED else int(text)) for text in named]
        return [value for value in tried if (choice, str(value)) not in self.forbid]

    def fixed(self, choice: str) -> int | None:
        """Return the number given for a choice or a mesh axis; None means that it is searched."""
        own = dict(self.axes)
        return own[choice] if choice in own else getattr(self, choice, None)

    def allowed(self, choice: str) -> list[str]:
        """Return the values that `allow` names of a choice; none means all."""
        return [value for name, value in self.allow if name == choice]

    def names(self, choice: str, value: object) -> bool:
        """Whether a value is named by the request: fixed or allowed."""
        return self.fixed(choice) == value or str(value) in self.allowed(choice)


def _check_named_value(field_name: str, choice: str, value: str) -> None:
    """Raise LayoutError for a pair of `allow` or `forbid` that names no choice or no value."""
    given = f"`{field_name}` {choice}={value} was given"
    if choice not in CHOICES:
        raise LayoutError(f"{given}; a choice is one of {', '.join(CHOICES)}")
    if choice == "schedule":
        find_schedule(value)
    elif choice == "recompute":
        if value not in RECOMPUTE_CHOICES:
            raise LayoutError(f"{given}; use {', '.join(RECOMPUTE_CHOICES)}, the ways to recompute")
    elif choice == "zero" and value not in ("0", "1", "2", "3"):
        raise LayoutError(f"{given}; ZeRO stages are 0, 1, 2 and 3: write zero=0 to zero=3")
    elif not value.isdecimal() or (int(value) < 1 and choice != "zero"):
        raise LayoutError(f"{given}; {choice} is a whole number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How sure the result is, under the cost model (not against the real machine).

    considered = evaluated + the sum of pruned + unexplored.
    """

    best_s: float
    """Step time of the plan."""
    lower_bound_s: float
    """A step time that no configuration of the space can beat."""
    considered: int
    """Configurations of the space."""
    evaluated: int
    """Configurations whose plan was priced."""
    unexplored: int
    """Configurations left when the search stopped early."""
    pruned: tuple[tuple[str, int], ...]
    """Configurations removed, by the rule that removed them."""
    proved_by: tuple[tuple[str, str], ...]
    """What proves each part of the result, such as the layouts, by part."""
    stopped_early: str = ""
    """Why the search stopped before its end; empty: it did not."""
    placements_gap: float = 0.0
    """Not in `gap`: the fraction of a block's seconds that better placements inside it might save,
    at most, of blocks that were not solved exactly."""

    @property
    def gap(self) -> float:
        """Relative distance from the lower bound; 0 means proved best."""
        if self.best_s <= 0:
            return 0.0
        gap = (self.best_s - self.lower_bound_s) / self.best_s
        # The bound and the simulation add the same seconds in another order.
        return gap if gap > 1e-12 else 0.0

    def to_dict(self) -> dict[str, object]:
        """JSON form, with the gap spelled out."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "pruned"},
            "proved_by": dict(self.proved_by),
            "pruned": dict(self.pruned),
            "gap": self.gap,
            "under": "the cost model",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A configuration that lost: its name, its price, and why in one line."""

    label: str
    step_s: float
    peak_bytes: float
    reason: str
    differences: tuple[tuple[str, float], ...] = ()
    """(part of the step, seconds that it takes longer than the best plan's), the largest loss
    first; parts of less than a fiftieth of the difference are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan with its certificate, or no plan and the reasons."""

    plan: Plan | None
    """None: nothing fits."""
    next_best: tuple[Plan, ...] = ()
    """The next best plans of other configurations, the fastest first: `num_best` - 1 of them, or
    fewer where there are no more."""
    runners_up: tuple[RunnerUp, ...] = ()
    """Configurations that lost, the fastest first."""
    reasons: tuple[str, ...] = ()
    """Why nothing fits, in whole sentences; empty with a plan."""
    certificate: Certificate | None = None
    """How sure the plan is the best."""
    smallest_memory_bytes: int | None = None
    """Where nothing fits: a limit per device under which a search finds a plan."""
    leanest: Plan | None = None
    """Where nothing fits: the plan that needs the least memory."""
    riskier: Plan | None = None
    """The fastest plan whose estimate alone fits, where it is faster than `plan`, which leaves room
    (`report.riskier`)."""
    whole_batch: str = ""
    """Why no plan cuts the batch, in one sentence; empty: plans may."""
    not_written: str = ""
    """Why no plan of the model can be written for the system that it is priced for, in one
    sentence; empty: it can, or is for our runtime."""
    search_s: float = field(default=0.0, compare=False)
    """Seconds that the search took."""
    is_out_of_time: bool = False
    """Without a plan: whether it is the time limit that ended the search."""
    was_kept: bool = field(default=False, compare=False)
    """Whether the result is that of an equal earlier search."""
