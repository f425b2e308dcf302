"""The record of a runtime, and reading it from its file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from planner.errors import PlannerError
from planner.language.plan.parts import Precision, low_dtype
from planner.language.stacks import execution_of, stack_names

BF16_BYTES = 2
DATA = Path(__file__).parent / "data"

Kernels = Literal["eager", "modules", "fused"]
"""How ops that only move bytes run: one by one; fused inside each module of the model's code, as
libraries of layers do; or fused wherever no product lies between, as compilers do."""

Overlapped = Literal["tp", "gathers", "scatters", "sums", "stages", "rows", "shared_rows"]
"""Kinds of collectives: of tensor parallel ranks; gathers of ZeRO's sharded weights, and sums to
its shards; sums over replicas without ZeRO; messages between interleaved stages; rows of experts
beside the compute of another microbatch, where the schedule merges two; and beside the experts that
every token goes through."""

RunKind = Literal["dense", "experts", "adapters"]
"""What is trained: all of a dense model, a mixture of experts, adapters of a frozen model."""

Scaling = Literal[
    "delayed",
    "current",
    "tensorwise",
    "rowwise",
    "rowwise-forward",
    "blocks",
    "blocks-kept",
    "tiles",
]
"""What the scale of a tensor in 8 bits is of (`costmodel.execution.casts`)."""

KeptNarrow = Literal["weights", "activations"]
"""Frozen weights of layers; what a gated activation takes."""

Prices = Literal["profile", "rates"]
"""Where an op's time comes from: a profile's measurements and fits of single ops; or the few rates
of its device that were fitted to whole training runs (`costmodel.table.kernels.DeviceRates`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a runtime executes a plan. Bytes are of one element, of one rank."""

    name: str
    """What it is called in rows, plans and commands."""
    prices: Prices
    """Where an op's time comes from."""
    kernels: Kernels
    """How ops that only move bytes run."""
    flash_attention: bool
    """Attention is one kernel; else its scores are written out."""
    vendor_attention: bool
    """That kernel is the device maker's (cuDNN), not portable code."""
    scaling: Scaling
    """How products in 8 bits are scaled, where they are."""
    pointwise_factor: float
    """How many times the bytes that fused pointwise kernels would move are moved."""
    dropout: bool
    """Activations are dropped out."""
    forward_kernels: int
    """Ops that the host issues for a layer's forward; a backward has twice as many."""
    module_kernels: int
    """Ops that it issues besides for each product or norm that a layer has beyond a plain one's
    (`executed_program.PLAIN_MODULES`): of latent attention, of norms of queries and keys, of
    attention to an encoder, of adapters, of experts that every token goes through."""
    head_kernels: int
    """Ops that it issues for the output matrix and the loss."""
    router_kernels: int
    """Ops that it issues besides for a layer's router, and to put rows in their experts' order."""
    expert_kernels: int
    """Ops that it issues besides for each expert that a rank has."""
    bias_kernels: int
    """Ops that it issues besides for each expert that a rank has, where biases are added to rows
    behind their last product."""
    region_kernels: int
    """Ops that it issues besides for each region of a layer's forward that runs again, twice as
    many in the backward."""
    ring_kernels: int
    """Ops that it issues besides for each round of attention on a ring: of a round's kernel, its
    messages, and what puts its result together with the others'."""
    job_kernels: int
    """Ops that it issues besides for each job of a stage: it takes the batch or a message, and
    hands its result on."""
    step_kernels: int
    """Ops that it issues once a step: norms, the optimizer, what is logged."""
    dropless: bool
    """Experts take all rows that are sent to them, and the host reads how many before it sends
    them; else they take a fixed number, and the others are dropped."""
    dispatchers: tuple[str, ...]
    """Dispatchers of experts' rows that it has (`costmodel.execution.dispatch`): of each layer the
    one is priced that takes least. The first is that of a row which names none."""
    pads_rows: bool
    """With products in 8 bits, rows are copied to a whole number of tiles for each expert, and
    back after the last product."""
    grouped_streams: int
    """Streams on which experts' products run side by side, each with a workspace of its own among
    the allocator's tensors, from the first step on; 0: none that is counted."""
    layer_workspaces: int
    """Workspaces that its library of layers has for products, of the size of those of experts."""
    product_workspaces: int
    """Workspaces of torch's own products, of output matrices and routers, among the allocator's
    tensors: one for each thread and stream that multiplies. 0: none that is counted."""
    deterministic: bool
    """Runs are asked to give the same numbers each time, for which these workspaces are as large on
    all devices (CUBLAS_WORKSPACE_CONFIG=:4096:8)."""
    fuses_exact: bool
    """Runs that are asked to do so have fused attention on all devices; else on Hopper's alone."""
    expert_imbalance: float
    """How unevenly ranks that share a layer's experts receive rows: standard deviation of the
    logarithm of a rank's rows, from layer to layer (`costmodel.execution.dispatch.imbalance`); 0
    where routing is forced to be even."""
    weighs_inside: bool
    """Rows of experts are weighed between an expert's products, so that what comes back is not
    saved; behind an activation that is not gated by a pass of its own, which saves what it takes.
    Else they are weighed as they are summed."""
    fused_saves: bool
    """A fused kernel saves what it takes for its backward, not what it makes inside."""
    keeps_narrow: tuple[KeptNarrow, ...]
    """What of layers that multiply in 8 bits lies in 8 bits besides what their products take."""
    attention_copies: bool
    """Fused attention copies queries, keys and values that lie inside a larger tensor, and saves
    the copies in place of that."""
    masks_batch: bool
    """With each microbatch a mask of all pairs of positions is loaded, a byte each, on the ranks
    that have the embedding or the head."""
    whole_batch: bool
    """Every rank is given a step's whole batch; else a microbatch at a time."""
    samples_first: bool
    """Its attention takes samples ahead of positions, and all else positions ahead of samples: of a
    microbatch of several samples what it makes is saved twice, as it made it and as it is laid for
    the next product."""
    scores_stay: bool
    """Attention that is not fused has a buffer as large as a layer's scores, from the first step
    on."""
    regathers: bool
    """What tp ranks gather for a product is saved in parts, and gathered again for the backward."""
    loss_bytes: int
    """Memory of a logit while the loss over parts of a vocabulary is computed: the logit, and what
    is made of it in fp32."""
    copies_update: bool
    """The optimizer's step makes one more copy of what it steps on, as fused and foreach steps do;
    else it goes over flat buffers in place."""
    rings_attention: bool
    """With cp, keys and values go round a ring and no mask is made; else each rank gathers
    them."""
    gradient_bytes: int
    """Memory of an accumulated gradient's element."""
    moment_bytes: tuple[int, int]
    """Memory of an element of each of the optimizer's two moments, of 16-bit weights."""
    master_bytes: int
    """Memory of an element of the optimizer's copy of 16-bit weights; 2 where that is only what the
    weights lack of fp32."""
    layers_on_host: int
    """First layers of a model without a pipeline whose saved tensors lie on the host between their
    forward and their backward; the copies are taken to hide behind compute."""
    sums_stay: bool
    """Sums of gradients have memory from the start of training to its end, with ZeRO 1 whole; else
    a step's first backward makes them."""
    bucket_bytes: int
    """Memory of an element of the buckets in which replicas without ZeRO sum gradients, beside the
    sums; 0 where the sums lie in the buckets."""
    adds_late: bool
    """A microbatch's gradients all stay, in the parameters' dtype, until its backward has ended on
    a stage, and are added to the sums then; else each is added as soon as it is made."""
    accumulate_bytes: int
    """Bytes moved to add a microbatch's gradient to it."""
    reduced_bytes: int
    """Bytes of a gradient on the wire."""
    optimizer_pass_bytes: float
    """Bytes that an optimizer step moves for each parameter."""
    bias_pass_bytes: tuple[float, float]
    """Bytes that biases move for each element of experts' rows to which they are added behind the
    last product, forward and backward; 0 where it is one kernel, in the rows' dtype."""
    loss_pass_bytes: float
    """Bytes that the loss moves for each logit, forward and backward together."""
    overlaps: tuple[Overlapped, ...]
    """Collectives that run beside compute, and show `exposed_part` of the device's rates and what
    outlasts the compute; of all others all shows."""
    sums_tensors: bool
    """Each of these is a message of its own; else they go in buckets as good as one."""
    scatters: bool
    """ZeRO 1 and 2 reduce each gradient to its shard alone; else all replicas get whole sums."""
    shards_tensors: bool
    """ZeRO cuts every tensor by itself, along one of its dims and filled up to equal shards; else
    it cuts flat memory, anywhere."""
    unpack_s: float
    """Seconds to copy one replica's part of one tensor out of the weights that ZeRO 1 and 2
    gathered; 0 where they are gathered in place."""
    sends_ahead: bool
    """A backward sends its input's gradient before it has made its first block's weight gradients;
    else after the whole backward."""
    keeps_gradient: bool
    """A rank keeps the gradient that it sent last to the stage before, until its next backward."""
    uses_all_links: bool
    """Gathers and scatters of ZeRO 3 go over all links of a node, not one."""
    polled_late_s: float
    """Seconds that the hosts of two tp ranks wait for each other at a collective, and again for
    each doubling of their number, while messages between stages cross nodes: the threads that poll
    for these take their cores."""
    crossing_late_s: float
    """Seconds that a collective of tp takes longer than alone for each node but one that its ranks
    lie on: the threads that serve the network, of all collectives of a block in turn, share cores
    with the hosts."""
    reserved_factor: float
    """Memory that the allocator reserves, over that of live tensors; 0 where no run tells."""
    reserved_sigma: float
    """One sigma of that, relative, of another model; 0 where no run tells."""
    retry_s: float
    """Seconds that a message between stages waits where that is more than a device has: its buffer
    is allocated only when cached memory is freed, which waits for the device."""
    graphs: bool
    """The halves of a compiled block are CUDA graphs, each of which the host starts as one, between
    copies of what it takes and gives (`costmodel.table.graphs`)."""
    launches_block: bool
    """The host waits for the end of each kernel that it starts."""
    selective_by_op: bool
    """Selective recomputation saves attention and every second product of a layer, and runs all
    else again, which takes half a forward; else it runs each layer's attention again."""
    sequence_parallel: bool
    """With tp, what goes from layer to layer is split by positions where a row does not say."""
    zero_stage: int
    """ZeRO stage where a row does not say."""
    recompute: str
    """Recomputation where a row does not say."""
    balances_stages: bool
    """Deals blocks to stages by their products' sizes, the head's too; else layers evenly."""
    interleaves: bool
    """Deals virtual stages where a row does not say."""
    seq_len: int
    """Tokens of a sample where a row does not say."""

    def bucket_factor(self, precision: Precision) -> int:
        """Return the bytes of a gradient in buckets beside the sums over those of its parameter."""
        is_cast = low_dtype(precision)
        return self.bucket_bytes // BF16_BYTES if is_cast else int(self.bucket_bytes > 0)

    def moments_factor(self, precision: Precision) -> float:
        """Return the bytes of the optimizer's moments over those of their parameter."""
        if not low_dtype(precision):
            return len(self.moment_bytes)
        whole, left = divmod(sum(self.moment_bytes), BF16_BYTES)
        return whole + left / BF16_BYTES if left else whole

    def master_factor(self, precision: Precision) -> int:
        """Return the bytes of the optimizer's copy of a parameter over those of the parameter."""
        return self.master_bytes // BF16_BYTES if low_dtype(precision) else 0

    def sum_factor(self, precision: Precision) -> int:
        """Return the bytes of a gradient's sum over those of its parameter."""
        return self.gradient_bytes // BF16_BYTES if low_dtype(precision) else 1


_LISTS = ("overlaps", "dispatchers", "keeps_narrow", "moment_bytes", "bias_pass_bytes")
"""Constants that are lists in files."""

_FIELDS = tuple(field.name for field in fields(Execution))


def execution_names() -> tuple[str, ...]:
    """Return the names of all records."""
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


@lru_cache(maxsize=64)
def find_execution(name: str) -> Execution:
    """Return a runtime's record, by its name or that of the stack whose runtime it is; raise
    PlannerError for an unknown name.
    """
    name = execution_of(name)
    values = {key: entry["value"] for key, entry in _entries(name).items()}
    lists = {key: tuple(values[key]) for key in _LISTS}
    return Execution(name=name, **values | lists)


def sources_of(name: str) -> Mapping[str, str]:
    """Return where each constant of a record comes from."""
    return {key: entry["source"] for key, entry in _entries(name).items()}


def residuals_of_runs(
    name: str, kind: RunKind, *, leave_out: Collection[str] = ()
) -> Mapping[str, float]:
    """Return the mean absolute relative error of published runs of a kind, by source.

    Of a runtime itself, else of the nearest that it extends of which there are any; `leave_out` are
    sources that are not counted.
    """
    record = read_record(name)
    found = {
        source: error
        for source, error in record["residuals"].get(kind, {}).items()
        if source not in leave_out
    }
    base = record.get("extends")
    return found if found or not base else residuals_of_runs(base, kind, leave_out=leave_out)


def memory_residuals(name: str) -> Mapping[str, float]:
    """Return the mean absolute relative error of memory that was measured, by source.

    Of a runtime itself, else of the nearest that it extends; empty where none was measured.
    """
    record = read_record(name)
    found: Mapping[str, float] = record.get("memory_residuals", {})
    base = record.get("extends")
    return found if found or not base else memory_residuals(base)


@lru_cache(maxsize=64)
def read_record(name: str) -> Mapping[str, Any]:
    """Return a record's file: `summary`, `extends`, `values`, residuals of steps and memory."""
    if name not in execution_names():  # which a path to another file is not
        systems = [other for other in stack_names() if other not in execution_names()]
        near = get_close_matches(name, (*execution_names(), *systems), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlannerError(
            f"execution {name!r} is unknown; {hint}valid names of runtimes: "
            f"{', '.join(execution_names())}; or of systems: {', '.join(systems)}"
        )
    text = (DATA / f"{name}.json").read_text(encoding="utf-8")
    record: Mapping[str, Any] = json.loads(text)
    return record


@lru_cache(maxsize=64)
def _entries(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The constants of a record with their sources: its own over those of what it extends."""
    record = read_record(name)
    base = record.get("extends")
    entries = {**(_entries(base) if base else {}), **record["values"]}
    missing = [field for field in _FIELDS if field not in entries and field != "name"]
    unknown = sorted(set(entries) - set(_FIELDS))
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise PlannerError(f"execution record {name}.json {what}; restore it")
    return entries
