"""The first gate: which layouts each microbatch size is tried with, and what arithmetic allows.

Shapes come here by degrees and ascending microbatch size. Their layouts are looked at as closely
as it takes to know them beaten (`drafts`); what is left is pushed for the other gates (`gates`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from search.gates import Progress, run_gates
from search.space import Shape
from search.stages.drafts import Draft, worth_trying
from search.stages.stage_table import StageTable
from search.walk import BEATEN, Unopened, Walk

TOO_LARGE = "memory: a smaller microbatch does not fit either"
NO_FASTER = "microbatch: a smaller one is as fast per sample"
NO_CP = "layout: cp cannot divide what blocks do"


def first_gate(search: Walk, shapes: list[Shape], progress: Progress | None) -> int:
    """Push every shape that the arithmetic bounds allow; return how many configurations it had.

    Microbatch sizes are priced in ascending order, and no further once a size would not fit
    however its blocks were split, or is no faster per sample than a smaller one (larger ones
    then only fill the pipeline less well). Shapes without a pipeline go through the other gates
    at once: quickly priced, they spare layouts of the next degrees from being priced at all.
    """
    groups: dict[tuple[int, int, int], list[Shape]] = {}
    for shape in shapes:
        groups.setdefault((shape.cp, shape.tp, shape.microbatch_size), []).append(shape)
    considered = done = 0
    for (cp, tp), sizes in groupby(sorted(groups), key=itemgetter(0, 1)):
        enough = ""
        for _, _, size in sizes:
            members = groups[cp, tp, size]
            if progress:
                progress(0.5 * done / len(groups), f"pricing tp={tp}, microbatch size {size}")
            done += 1
            if enough:
                count = sum(shape.num_configurations for shape in members)
                considered += count
                search.pruned[enough] += count
                search.skipped_sizes.add((cp, tp, size))
                continue
            found, enough = _price_size(search, members)
            considered += found
        run_gates(search, None)
    return considered


def _price_size(search: Walk, members: list[Shape]) -> tuple[int, str]:
    """Push shapes of equal degrees and size, but for pp; return how many configurations they had
    with all layouts, and why no larger size is to be tried, if none is.
    """
    shape = members[0]
    cp, tp, size = shape.cp, shape.tp, shape.microbatch_size
    count = sum(one.num_configurations for one in members)
    if cp > 1:
        bound = _least_with_cp(members, search.least_per_sample.get((1, tp), 0.0))
        if bound < search.best_s and search.best is not None and search.out_of_time():
            search.leave_out(bound, count)
            return count, ""
        if bound >= search.best_s:
            search.pruned[BEATEN] += count
            return count, ""
    known = search.candidates.drafts
    drafts: tuple[Draft, ...] = (known.sketch(tp, size),) if cp == 1 < tp else ()
    for ask in (known.fastest, known.of):
        # What is not beaten is looked at more closely.
        if not drafts or not _is_beaten(search, drafts[0], members):
            drafts = ask(tp, size, cp)
    if not drafts:
        search.pruned[NO_CP] += count
        return count, ""
    beaten = [draft for draft in drafts if _is_beaten(search, draft, members)]
    tables = worth_trying(draft.table for draft in drafts if draft not in beaten)
    for draft in beaten:
        for one in members:
            bound = draft.least_step_s(one)
            search.push(Unopened(shape=one, find_table=draft.find_table, bound=bound))
    fitted, seconds = bool(beaten), float("inf")
    for table in tables:
        bounds = search.candidates.bounds(table)
        seconds = min(seconds, bounds.block_seconds(shape.recompute) / size)
        for one in members:
            fitted |= _push_shape(search, one, table)
    key, considered = (cp, tp), count * (len(beaten) + len(tables))
    least = min([seconds, *(draft.least_s / size for draft in beaten)])
    search.least_per_sample[key] = min(least, search.least_per_sample.get(key, float("inf")))
    before = search.per_sample.get(key, float("inf"))
    search.per_sample[key] = min(seconds, before)
    if not fitted and not _larger_may_fit(search, members):
        return considered, TOO_LARGE
    if not search.every_size and not beaten and seconds >= before:
        return considered, NO_FASTER
    return considered, ""


def _is_beaten(search: Walk, draft: Draft, members: list[Shape]) -> bool:
    """Whether the best is as fast as any of the shapes could be with a layout."""
    return all(draft.least_step_s(shape) >= search.best_s for shape in members)


def _least_with_cp(members: list[Shape], per_sample_s: float) -> float:
    """Return a step time that shapes of one cp cannot beat, from a sample's seconds without it."""
    return min(
        shape.num_microbatches * shape.microbatch_size * per_sample_s / (shape.cp * shape.pp)
        for shape in members
    )


def _larger_may_fit(search: Walk, members: list[Shape]) -> bool:
    """Whether a larger microbatch may fit though this one does not, as its layouts may lie
    otherwise: where the leanest layout would fit here, or, once nothing has fitted at all, where
    this size's own are not more than twice too large.
    """
    shape = members[0]
    size = shape.tp, shape.microbatch_size, shape.cp
    if search.every_size:
        tables, enough = search.candidates.tables(*size), 2 * search.memory_limit_bytes
    else:
        tables = search.candidates.drafts.leanest(*size) if shape.tp > 1 else ()
        enough = search.memory_limit_bytes
    return any(
        search.candidates.bounds(table).least_peak_bytes(one) <= enough
        for table in tables
        for shape in members
        for one in replace(shape, options=shape.options[:1]).configurations()
    )


def _push_shape(search: Walk, shape: Shape, table: StageTable) -> bool:
    """Push a shape without the ZeRO stages that cannot fit; return whether any can."""
    bounds = search.candidates.bounds(table)
    samples = {one.zero: one for one in replace(shape, options=shape.options[:1]).configurations()}
    zeros = tuple(
        zero
        for zero, one in samples.items()
        if bounds.least_peak_bytes(one) <= search.memory_limit_bytes
    )
    gone = (len(shape.zeros) - len(zeros)) * len(shape.options)
    if gone:
        search.pruned["memory: parameters or one block alone"] += gone
    if not zeros:
        return False
    bound = bounds.least_step_of_shape(shape)
    part = Unopened(shape=replace(shape, zeros=zeros), find_table=lambda: table, bound=bound)
    if shape.pp == 1:
        search.push(part)
    else:
        search.pipelines.append(part)
    return True
