"""What a search is asked, and what it answers: plain frozen data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar, cast, get_args

from planner.errors import LayoutError
from planner.plan import Plan, Precision, Recompute
from planner.schedule import find_schedule
from search.on_host import OFFLOADS, Offload

SOLVERS = ("dp", "recursive", "cpsat", "brute_force")
RECOMPUTE_CHOICES: tuple[Recompute, ...] = ("none", "selective", "full")
_NAMED = ("schedule", "recompute")
CHOICES = ("dp", "tp", "pp", "vpp", "cp", "microbatch_size", "zero", *_NAMED)
"""What can be fixed, allowed or forbidden by value."""

Meshes = Literal["same", "own"]

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The question: this many devices, this global batch (samples), under this memory.

    `memory_limit_bytes` is per device (None: what the profile says is usable). Every choice
    left None is searched; one that is given is honoured exactly, never clamped.
    The schedule ``synthesised`` searches every named one and then makes a table of its own for
    the best few plans, kept where it is faster.
    `max_gap` and `time_limit_s` stop the search early, and the certificate says so.
    `model_file` is written into the plan as the place the model came from. `solver` picks
    the searcher of stage boundaries: ``dp`` (exact for its recurrence), ``recursive`` (fast),
    ``cpsat`` or ``brute_force`` (referees, for small models).
    `forbid` holds (choice, value) pairs that no answer may use; of a choice that `allow` names,
    only the values it pairs it with are searched. `pins` holds (class_index, tensor name,
    placement text) triples that every layout must respect.
    `precision` is what the graph was captured in, not searched; nor is `receive_ahead`, which
    plans take over, nor whether the script clips gradients (`clip_gradients`).
    `balance`, if not empty, fixes the stages: so many blocks each, in order.
    `offload` says what is on the host; ``auto`` tries that only where nothing fits without.
    `meshes` says whether stages share one dp and tp.
    """

    num_devices: int
    global_batch: int
    memory_limit_bytes: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    microbatch_size: int | None = None
    schedule: str | None = None
    zero: int | None = None
    recompute: str | None = None
    model_file: str = ""
    max_gap: float = 0.0
    time_limit_s: float | None = None
    solver: str = "dp"
    forbid: tuple[tuple[str, str], ...] = ()
    allow: tuple[tuple[str, str], ...] = ()
    pins: tuple[tuple[int, str, str], ...] = ()
    precision: Precision = "model"
    receive_ahead: int = 2
    clip_gradients: bool = False
    balance: tuple[int, ...] = ()
    offload: Offload = "auto"
    meshes: Meshes = "same"

    def __post_init__(self) -> None:
        """Raise LayoutError when a number cannot mean anything."""
        if self.num_devices < 1:
            raise LayoutError(
                f"--gpus {self.num_devices} was given; training needs at least one device, "
                "so use --gpus 1 or more"
            )
        if self.global_batch < 1:
            raise LayoutError(
                f"--global-batch {self.global_batch} was given; a step needs at least one sample, "
                "so use --global-batch 1 or more"
            )
        for name in ("dp", "tp", "pp", "vpp", "cp", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise LayoutError(
                    f"{flag} {value} was given; it counts something, so it must be 1 or more, "
                    "or left out to be searched"
                )
        if self.zero not in (None, 0, 1, 2, 3):
            raise LayoutError(f"--zero {self.zero} was given; ZeRO stages are 0, 1, 2 and 3")
        if self.recompute not in (None, *RECOMPUTE_CHOICES):
            raise LayoutError(
                f"--recompute {self.recompute} was given; use {', '.join(RECOMPUTE_CHOICES[:-1])} "
                f"or {RECOMPUTE_CHOICES[-1]}"
            )
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise LayoutError(
                f"a memory limit of {self.memory_limit_bytes} bytes was given; it must be positive"
            )
        if self.offload not in OFFLOADS:
            raise LayoutError(
                f"--offload {self.offload} was given; use {', '.join(OFFLOADS[:-1])} or "
                f"{OFFLOADS[-1]}"
            )
        if self.meshes not in get_args(Meshes):
            raise LayoutError(
                f"--meshes {self.meshes} was given; use same (one dp and tp for all stages) or own"
            )
        if self.precision not in get_args(Precision):
            raise LayoutError(
                f"--precision {self.precision} was given; use {' or '.join(get_args(Precision))}"
            )
        if self.receive_ahead < 0:
            raise LayoutError(
                f"--receive-ahead {self.receive_ahead} was given; it counts jobs: 0 or more"
            )
        if self.solver not in SOLVERS:
            raise LayoutError(f"--solver {self.solver} was given; use one of {', '.join(SOLVERS)}")
        if not 0 <= self.max_gap < 1:  # nor is nan
            raise LayoutError(
                f"--gap {self.max_gap} was given; a gap is a part of the step time, 0 or more and "
                "below 1, such as 0.02"
            )

        for flag, pairs in (("--allow", self.allow), ("--forbid", self.forbid)):
            for choice, value in pairs:
                _check_named_value(flag, choice, value)
        for choice in CHOICES:
            fixed = getattr(self, choice)
            named = self.allowed(choice)
            if named and all((choice, value) in self.forbid for value in named):
                raise LayoutError(
                    f"--allow and --forbid both name {choice}={','.join(named)}, which leaves no "
                    f"{choice} to search; drop one of them"
                )
            flag = "--" + choice.replace("_", "-")
            if (choice, str(fixed)) in self.forbid:
                raise LayoutError(
                    f"{flag} {fixed} and --forbid {choice}={fixed} were given; drop one of them"
                )
            if fixed is not None and named and str(fixed) not in named:
                raise LayoutError(
                    f"{flag} {fixed} was given and --allow {choice} names {', '.join(named)} "
                    "only; drop one of them"
                )

    def values(self, choice: str, searched: Iterable[Value]) -> list[Value]:
        """Return what to try of a choice: the fixed value, those allowed, or all `searched`;
        without the forbidden ones. A fixed or allowed value need not be among `searched`.
        """
        fixed = getattr(self, choice)
        tried: Iterable[Value] = searched if fixed is None else (fixed,)
        if fixed is None and (named := self.allowed(choice)):
            tried = [cast("Value", text if choice in _NAMED else int(text)) for text in named]
        return [value for value in tried if (choice, str(value)) not in self.forbid]

    def allowed(self, choice: str) -> list[str]:
        """Return the values that `allow` names of a choice; none means all."""
        return [value for name, value in self.allow if name == choice]

    def asks_for(self, choice: str, value: object) -> bool:
        """Whether the user named this value, by fixing or allowing it."""
        return getattr(self, choice) == value or str(value) in self.allowed(choice)


def _check_named_value(flag: str, choice: str, value: str) -> None:
    """Raise LayoutError for a pair of `allow` or `forbid` that names no choice or no value."""
    given = f"{flag} {choice}={value} was given"
    if choice not in CHOICES:
        raise LayoutError(f"{given}; a choice is one of {', '.join(CHOICES)}")
    if choice == "schedule":
        find_schedule(value)
    elif choice == "recompute":
        if value not in RECOMPUTE_CHOICES:
            raise LayoutError(f"{given}; use {', '.join(RECOMPUTE_CHOICES)}")
    elif choice == "zero" and value not in ("0", "1", "2", "3"):
        raise LayoutError(f"{given}; ZeRO stages are 0, 1, 2 and 3")
    elif not value.isdecimal() or (int(value) < 1 and choice != "zero"):
        raise LayoutError(f"{given}; {choice} is a whole number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How sure the answer is, under the cost model (not against the real machine).

    `lower_bound_s` is a step time that no configuration of the space can beat;
    `gap` is (best_s - lower_bound_s) / best_s. `pruned` counts configurations by the rule
    that removed them, so considered = evaluated + the sum of pruned + unexplored.
    `placements_gap` is not in it: the part of a block's seconds that better placements inside it
    might save, at most, of the blocks too wide to be solved exactly.
    """

    best_s: float
    lower_bound_s: float
    considered: int
    evaluated: int
    unexplored: int
    pruned: tuple[tuple[str, int], ...]
    proved_by: tuple[tuple[str, str], ...]
    stopped_early: str = ""
    placements_gap: float = 0.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan with its certificate, or no plan and the reasons.

    `reasons` says in whole sentences why nothing fits; it is empty when there is a plan.
    `leanest` is then the plan that needs the least memory, `smallest_memory_bytes` a limit
    under which a search finds one (`remedies` tells what else would do). `search_s` is
    what the search took, `was_kept` whether that was an earlier one.
    """

    plan: Plan | None
    runners_up: tuple[RunnerUp, ...] = ()
    reasons: tuple[str, ...] = ()
    certificate: Certificate | None = None
    smallest_memory_bytes: int | None = None
    leanest: Plan | None = None
    search_s: float = field(default=0.0, compare=False)
    was_kept: bool = field(default=False, compare=False)
