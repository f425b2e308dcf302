"""The space of configurations: every (dp, tp, pp, vpp, microbatch size, ...) that divides.

A configuration fixes everything but the stage boundaries and the placements inside blocks.
Degrees are any divisors, not only powers of two, and what the user fixed is honoured
exactly. Tensor-parallel groups stay inside a node, ranks hold at most `MOST_VPP` stages, and cp
leaves each rank `LEAST_POSITIONS` of a sequence, unless asked otherwise by `tp`, `vpp` or `cp`.

A `Shape` is a set of configurations that differ in schedule, vpp and ZeRO stage alone; they
share most bounds, so a search opens a shape only when it may hold the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.layout.sequences import check_hands_on_sequences, longest_sequence
from planner.plan import Recompute
from planner.schedule import DEFAULT_SCHEDULE, find_schedule, searched_schedules
from search.request import RECOMPUTE_CHOICES, SearchRequest
from search.request_checks import divisors, listed, validate_request

MOST_VPP = 8
LEAST_POSITIONS = 8192
"""Of a sequence, left to each cp rank unless cp is asked for: what Llama 3 405B left at 131,072
tokens, with no cp at 8,192 (The Llama 3 Herd of Models, table 4)."""
SEARCHED_ZERO = (0, 1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One point of the space. `recompute` is one for all stages, ``mixed`` (any by stage), or
    those that stages choose between, joined by ``|``. `stage_tps` is empty where all stages
    have this dp and tp, else each stage's tp.
    """

    dp: int
    cp: int
    tp: int
    pp: int
    vpp: int
    microbatch_size: int
    num_microbatches: int
    schedule: str
    zero: int
    recompute: str
    stage_tps: tuple[int, ...] = ()

    @property
    def pipeline(self) -> tuple[str, int, int, int]:
        """What its job table follows from: schedule, pp, vpp and number of microbatches."""
        return self.schedule, self.pp, self.vpp, self.num_microbatches

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO has replicas to shard over."""
        return self.zero > 0 and self.dp * self.cp > 1

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have jobs of their own with something to do: ZeRO's are made
        with the input's, since FSDP2 reduces them when a block's backward ends.
        """
        return find_schedule(self.schedule).splits_backward and not self.is_sharded

    @property
    def label(self) -> str:
        """Short name such as ``dp2 tp4 pp8 mbs1x16 1f1b zero1 recompute-none``."""
        tps = "/".join(map(str, self.stage_tps)) or self.tp
        parts = [f"dp{self.dp}", f"tp{tps}", f"pp{self.pp}"]
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        if self.vpp > 1:
            parts.append(f"vpp{self.vpp}")
        parts.append(f"mbs{self.microbatch_size}x{self.num_microbatches}")
        if self.pp > 1:
            parts.append(self.schedule)
        return " ".join([*parts, f"zero{self.zero}", f"recompute-{self.recompute}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Configurations of equal degrees and microbatches: one for each option and ZeRO stage."""

    dp: int
    cp: int
    tp: int
    pp: int
    microbatch_size: int
    num_microbatches: int
    options: tuple[tuple[str, int], ...]
    zeros: tuple[int, ...]
    recompute: str

    @property
    def num_configurations(self) -> int:
        """How many configurations the shape holds."""
        return len(self.options) * len(self.zeros)

    def configurations(self) -> Iterator[Configuration]:
        """Yield each of them."""
        for schedule, vpp in self.options:
            for zero in self.zeros:
                yield Configuration(
                    dp=self.dp, cp=self.cp, tp=self.tp, pp=self.pp, vpp=vpp,
                    microbatch_size=self.microbatch_size,
                    num_microbatches=self.num_microbatches,
                    schedule=schedule, zero=zero, recompute=self.recompute,
                )  # fmt: skip


Reasons = dict[str, str]
"""Rules that left out degrees or schedules, each with its first example; grows in place."""


def recompute_choices(recompute: str) -> tuple[Recompute, ...]:
    """Return what each stage may choose between."""
    if recompute == "mixed":
        return RECOMPUTE_CHOICES
    return tuple(cast("Recompute", choice) for choice in recompute.split("|"))


def list_shapes(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    can_split: Callable[[int], bool],
) -> list[Shape]:
    """Return every shape that divides; raise LayoutError when there is none.

    `can_split(tp)` says whether any op of the model has a sharded strategy at that degree.
    """
    validate_request(request, graph, cluster)
    if request.tp is not None and request.tp > 1 and not can_split(request.tp):
        tried = [d for d in divisors(request.num_devices) if d == 1 or can_split(d)]
        raise LayoutError(
            f"tp={request.tp} divides no tensor dimension of model {graph.name!r} that an op can "
            f"be split along; use tp in {listed(tried)}"
        )
    reasons: Reasons = {}
    found = list(_shapes(request, graph, cluster, can_split, reasons))
    if not found:
        why = "; ".join(reasons.values()) or "the fixed choices exclude each other"
        raise LayoutError(
            f"{request.num_devices} devices with a global batch of {request.global_batch} cannot "
            f"be used: {why}; try another `num_devices` or `global_batch`, such as "
            f"`global_batch` {_next_multiple(request.global_batch, request.num_devices)}"
        )
    return found


def list_configurations(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    *,
    can_split: Callable[[int], bool],
) -> list[Configuration]:
    """Return every configuration that divides, shape by shape; errors as `list_shapes`."""
    shapes = list_shapes(request, graph, cluster, can_split=can_split)
    return [configuration for shape in shapes for configuration in shape.configurations()]


def _shapes(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    can_split: Callable[[int], bool],
    reasons: Reasons,
) -> Iterator[Shape]:
    options_of: dict[tuple[int, int], tuple[tuple[str, int], ...]] = {}
    # What remakes least comes first: stages take the first that fits.
    allowed = sorted(request.values("recompute", RECOMPUTE_CHOICES), key=RECOMPUTE_CHOICES.index)
    recompute = "mixed" if allowed == list(RECOMPUTE_CHOICES) else "|".join(allowed)
    if not allowed:
        reasons.setdefault("forbidden", "every kind of recompute is forbidden")
        return
    for dp, cp, tp, pp in _degrees(request, graph, cluster, can_split, reasons):
        if pp > len(graph.blocks):
            reasons.setdefault("too few blocks", f"pp={pp} is more than {len(graph.blocks)} blocks")
            continue
        if request.global_batch % dp:
            reasons.setdefault(
                "dp divides the batch", f"dp={dp} does not divide the batch {request.global_batch}"
            )
            continue
        per_dp = request.global_batch // dp
        for size in request.values("microbatch_size", divisors(per_dp)):
            if per_dp % size:
                continue
            key = (pp, per_dp // size)
            if key not in options_of:
                options_of[key] = tuple(
                    option
                    for option in _schedules(request, graph, *key, reasons)
                    if not (request.balance and pp * option[1] != len(request.balance))
                )
            zeros = tuple(request.values("zero", SEARCHED_ZERO if dp * cp > 1 else (0,)))
            if options_of[key] and zeros:
                yield Shape(
                    dp=dp, cp=cp, tp=tp, pp=pp, microbatch_size=size, num_microbatches=key[1],
                    options=options_of[key], zeros=zeros, recompute=recompute,
                )  # fmt: skip


def _degrees(
    request: SearchRequest,
    graph: ModelGraph,
    cluster: ClusterSpec,
    can_split: Callable[[int], bool],
    reasons: Reasons,
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (dp, cp, tp, pp)."""
    n = request.num_devices
    most_cp = longest_sequence(graph) // LEAST_POSITIONS
    cps = [cp for cp in divisors(n) if cp == 1 or cp <= most_cp]
    for tp in request.values("tp", divisors(n)):
        if n % tp:
            continue
        if not request.names("tp", tp) and tp > 1:
            if tp > cluster.devices_per_node:
                reasons.setdefault(
                    "tp stays in a node", f"tp={tp} spans nodes, which only a fixed `tp` may"
                )
                continue
            if not can_split(tp):
                reasons.setdefault("tp splits an op", f"tp={tp} divides no dimension of the model")
                continue
        for cp in request.values("cp", cps):
            if n % (tp * cp):
                continue
            if cp > 1 and (reason := _why_not_cp(graph, cp)):
                reasons.setdefault("cp divides sequences", reason)
                continue
            for pp in request.values("pp", divisors(n // tp // cp)):
                dp = n // tp // cp // pp
                if n % (tp * cp * pp) == 0 and dp in request.values("dp", (dp,)):
                    yield dp, cp, tp, pp


def _why_not_cp(graph: ModelGraph, cp: int) -> str:
    """Say why cp cannot divide the sequences of a model; nothing when it can."""
    try:
        check_hands_on_sequences(graph, "cp", cp)
    except LayoutError as error:
        return str(error)
    return ""


def _schedules(
    request: SearchRequest,
    graph: ModelGraph,
    pp: int,
    num_microbatches: int,
    reasons: Reasons,
) -> Iterator[tuple[str, int]]:
    """Yield (schedule, vpp); one plain pair when there is no pipeline to schedule."""
    if pp == 1 and request.schedule is None and 1 in request.values("vpp", (1,)):
        yield DEFAULT_SCHEDULE, 1
        return
    for name in request.values("schedule", searched_schedules()):
        spec = find_schedule(name)
        most = min(len(graph.blocks) // pp, spec.max_vpp or len(graph.blocks))
        for vpp in request.values("vpp", range(spec.min_vpp, min(most, MOST_VPP) + 1)):
            if not spec.min_vpp <= vpp <= most:
                continue
            reason = spec.why_not(pp=pp, vpp=vpp, num_microbatches=num_microbatches)
            if reason is None:
                yield name, vpp
            elif num_microbatches < pp:
                reasons.setdefault(
                    "too few microbatches",
                    f"pp={pp} needs {pp} microbatches and the batch gives {num_microbatches}",
                )
            else:
                reasons.setdefault("schedule takes the sizes", reason)


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
