"""A run described by a row of a table, with every blank filled and the filling listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any

from costmodel.execution import Execution
from costmodel.table.rows.model_counts import ModelCounts
from costmodel.table.rows.row_sizes import check_divides, sizes_of_row
from costmodel.table.rows.row_stack import stack_of_row
from costmodel.table.rows.row_words import (
    Cells,
    RowError,
    dtype_of,
    real,
    recompute_of,
    schedule_of,
    zero_of,
)
from planner.language.templates import Transformer

MODEL_BYTES_PER_DEVICE = 40e9
"""What weights and optimizer state may take of a device where a row leaves its layout open."""

TRAINED_BYTES = 18
"""Bytes of a parameter with its gradient, master weight and Adam's two moments."""

DEVICES_PER_NODE = 8
"""Devices of a node where a row gives nodes and no devices."""

USUAL_TOKENS = 4096
"""Tokens of a microbatch up to which samples go together, in models up to as wide; the median of
published runs."""

USUAL_STAGE_LAYERS = 4
"""Layers of a virtual stage; the interleaved runs that NVIDIA publishes have 1 to 5."""

USUAL_LORA_RANK = 16
"""Rank of adapters where a row does not say: MLPerf's (mlcommons/training, llama2_70b_lora)."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run with every blank filled; `assumed` says with what."""

    sizes: Transformer
    """Sizes of its model."""
    stack: Execution
    """The runtime that it is priced for."""
    dtype: str
    """In which layers multiply."""
    global_batch: int
    """Samples of a step."""
    micro_batch: int
    """Samples of a microbatch of a replica."""
    tp: int
    """Tensor-parallel ranks."""
    cp: int
    """Context-parallel ranks."""
    pp: int
    """Pipeline ranks."""
    vpp: int
    """Stages of a pipeline rank."""
    dp: int
    """Replicas."""
    sequence_parallel: bool
    """Whether what goes from layer to layer is split by positions over tp ranks."""
    zero_stage: int
    """ZeRO stage, 0 to 3."""
    schedule: str
    """The pipeline's, by its name in rows (`row_plan.SCHEDULES`)."""
    recompute: str
    """``none``, ``selective`` (with modules where the row names some) or ``full``."""
    ep: int = 1
    """Ranks of a stage that share the experts."""
    etp: int = 1
    """tp ranks that share each expert's matrices; 1: whole experts lie on tp ranks, too."""
    lora_rank: int = 0
    """Rank of the adapters that alone are trained, beside the attention's products; 0: all is."""
    recompute_layers: int = 0
    """First layers of each stage that recompute, where the others recompute nothing; 0: all do."""
    vocab_multiple: int = 0
    """What the vocabulary of each tp rank is padded to a multiple of; 0: 128 where tp splits it."""
    microbatch_group: int = 0
    """Microbatches that go through a virtual stage before the next one's turn; 0: pp, and the
    number of microbatches is a multiple of it."""
    stage_blocks: tuple[int, ...] = ()
    """Blocks of each stage, the embedding and the head among them; empty: as its stack deals
    them."""
    assumed: tuple[str, ...] = field(default=())
    """``column=value`` of each column that was filled in."""

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.tp * self.cp * self.pp * self.dp

    def assumed_to_be(self, column: str) -> bool:
        """Whether a column was filled in."""
        return any(text.startswith(f"{column}=") for text in self.assumed)

    def assuming(self, **columns: Any) -> RunRow:
        """Return the run with other values of columns that were filled in."""
        told = [text for text in self.assumed if text.partition("=")[0] not in columns]
        told += [f"{name}={value}" for name, value in columns.items()]
        return replace(self, **columns, assumed=tuple(told))

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one dp replica; an uneven last one counts whole."""
        return max(1, ceil(self.global_batch / (self.dp * self.micro_batch)))


def parse_row(row: Mapping[str, Any]) -> RunRow:
    """Fill a row's blanks with the framework's usual choices.

    Raises RowError, in one line, when the row lacks the model's size, or its numbers do not
    divide.
    """
    cells = Cells(row)
    stack = stack_of_row(cells)
    sizes = sizes_of_row(cells, stack)
    if sizes.experts is not None:
        # A run that names no dispatcher has what its runtime has where nothing is said.
        stack = replace(stack, dispatchers=stack.dispatchers[:1])
    tp, cp, pp, dp = _layout(cells, sizes, stack)
    check_divides("tp", tp, "heads", sizes.heads)
    width = ModelCounts(sizes).ffn_width
    if width < tp:
        raise RowError(f"tp={tp} is more than ffn_hidden={width}")
    ep = cells.given("ep", least=0) or 1
    if ep > dp * cp * tp:
        ep = cells.assume("ep", dp * cp * tp)
    if sizes.experts is not None:
        check_divides("ep", ep, "num_experts", sizes.experts.number)
    # Where dp and cp ranks are too few, whole experts lie on tp ranks, too.
    etp = 1 if ep > dp * cp else _said_etp(cells) or tp
    batch, micro_batch = _batch(cells, sizes, stack, pp=pp, dp=dp)
    interleaves = stack.interleaves and batch % (dp * micro_batch * pp) == 0
    schedule, vpp = _schedule(cells, layers=sizes.layers, pp=pp, interleaves=interleaves)
    return RunRow(
        sizes=sizes,
        stack=stack,
        dtype=_dtype(cells),
        global_batch=batch,
        micro_batch=micro_batch,
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        ep=ep,
        etp=etp,
        sequence_parallel=bool(
            cells.number("sp", int(stack.sequence_parallel and tp > 1), least=0)
        ),
        zero_stage=_zero_stage(cells, stack),
        schedule=schedule,
        recompute=_recompute(cells, stack),
        lora_rank=_lora_rank(cells),
        recompute_layers=cells.given("recompute_layers", least=0) or 0,
        vocab_multiple=cells.given("vocab_multiple", least=0) or 0,
        microbatch_group=cells.given("microbatch_group", least=0) or 0,
        stage_blocks=_stage_blocks(cells, sizes.layers + sizes.ahead + 2, pp * vpp),
        assumed=tuple(cells.assumed),
    )


def _said_etp(cells: Cells) -> int | None:
    """Return the tp ranks that share an expert's matrices, as a column or the notes say."""
    noted = re.search(r"\betp\s*=?\s*(\d+)", cells.text("notes"))
    return cells.given("etp") or (int(noted[1]) if noted else None)


def _batch(
    cells: Cells, sizes: Transformer, stack: Execution, *, pp: int, dp: int
) -> tuple[int, int]:
    """Return samples of a step and of a microbatch (see `_usual_micro_batch`)."""
    micro_batch = cells.given("micro_batch")
    number, tokens, _ = cells.text("global_batch").lower().partition("tok")
    if tokens and (count := real(number)):
        batch = cells.assume("global_batch", max(1, round(count / sizes.seq_len)))
    else:
        batch = cells.given("global_batch")
    if batch is None:
        batch = dp * (micro_batch or 1) * (1 if pp == 1 else 4 * pp)
        cells.assume("global_batch", batch)
    most = max(1, ceil(batch / dp))
    if micro_batch is None:
        usual = _usual_micro_batch(sizes, stack, samples=most, pp=pp)
        micro_batch = cells.assume("micro_batch", usual)
    elif micro_batch > most:
        micro_batch = cells.assume("micro_batch", most)
    return batch, micro_batch


def _usual_micro_batch(sizes: Transformer, stack: Execution, *, samples: int, pp: int) -> int:
    """Return how many of a rank's samples usually go at once.

    Of FSDP without a pipeline all, as nothing is split. Else a power of two that divides them, of
    so many tokens as fill a device, fewer of a wide model, and leaves a pipeline two microbatches
    for each of its ranks.
    """
    if stack.zero_stage == 3 and stack.flash_attention and pp == 1:
        return samples
    tokens = USUAL_TOKENS * min(1.0, USUAL_TOKENS / sizes.hidden)
    size = 1
    while 2 * size * sizes.seq_len <= tokens and samples % (2 * size) == 0:
        if pp > 1 and samples // (2 * size) < 2 * pp:
            break
        size *= 2
    return size


def _zero_stage(cells: Cells, stack: Execution) -> int:
    stage = zero_of(cells.raw("zero_stage"))
    return cells.assume("zero_stage", stack.zero_stage) if stage is None else stage


def _layout(cells: Cells, sizes: Transformer, stack: Execution) -> tuple[int, int, int, int]:
    """Return tp, cp, pp, dp; what is blank follows from the number of devices."""
    tp, pp, dp = (cells.given(name) for name in ("tp", "pp", "dp"))
    cp = cells.given("cp", least=0) or 1
    gpus = cells.given("gpus")
    # Devices that weights and state fill, the least that the model may be cut over.
    needed = ModelCounts(sizes).num_params * TRAINED_BYTES / MODEL_BYTES_PER_DEVICE
    if gpus is None and dp is None:
        if nodes := cells.given("nodes"):
            gpus = cells.assume("gpus", DEVICES_PER_NODE * nodes)
        elif tp is pp is None:
            gpus = cells.assume("gpus", cp * 2 ** max(0, ceil(log2(needed))))
    if gpus is not None:
        check_divides("cp", cp, "gpus", gpus)
    if gpus is not None and tp is None and pp is None and stack.zero_stage < 3:
        # Model parallel ranks: those dp leaves, else as few as hold the weights.
        ranks = gpus // (dp * cp) if dp else min(gpus // cp, ceil(needed))
        tp = _largest_divisor(gpus // cp, sizes.heads, at_most=min(8, ranks))
        pp = ranks // tp if dp else _least_divisor(gpus // (cp * tp), at_least=ranks / tp)
        cells.assume("tp", tp)
        cells.assume("pp", pp)
    elif gpus is not None and dp is not None and None in (tp, pp):
        left = max(1, gpus // (cp * dp * (tp or 1) * (pp or 1)))
        tp = tp or cells.assume("tp", left)
        pp = pp or cells.assume("pp", left if cells.given("tp") else 1)
    tp = tp or cells.assume("tp", 1)
    pp = pp or cells.assume("pp", 1)
    dp = dp or cells.assume("dp", max(1, (gpus or 1) // (tp * cp * pp)))
    if gpus is not None and tp * cp * pp * dp != gpus:
        raise RowError(
            f"tp*cp*pp*dp = {tp * cp * pp * dp} does not equal gpus={gpus}; "
            "the layout is incomplete"
        )
    return tp, cp, pp, dp


def _largest_divisor(*numbers: int, at_most: int) -> int:
    fitting = (n for n in range(1, max(1, at_most) + 1) if all(m % n == 0 for m in numbers))
    return max(fitting)


def _least_divisor(number: int, *, at_least: float) -> int:
    return next(n for n in range(1, number + 1) if number % n == 0 and n >= min(at_least, number))


def _usual_vpp(layers_of_rank: int) -> int:
    """Virtual stages of a few layers each, as nearly as they divide."""
    sizes = [n for n in range(1, 4 * USUAL_STAGE_LAYERS + 1) if layers_of_rank % n == 0]
    return layers_of_rank // min(sizes, key=lambda n: abs(log2(n / USUAL_STAGE_LAYERS)))


def _schedule(cells: Cells, *, layers: int, pp: int, interleaves: bool) -> tuple[str, int]:
    """Return the schedule and vpp; a row that names neither has its stack's usual ones."""
    named = cells.text("schedule")
    schedule, vpp = schedule_of(named), cells.given("vpp", least=0)
    if named and schedule is None:
        cells.assume("schedule", "from vpp")
    if pp == 1:
        return "1f1b", 1
    if vpp is None:
        splits = schedule == "interleaved-1f1b" and layers // pp >= 2
        # The embedding and the head may each take a layer's place.
        dealt = next((n for n in (layers, layers + 2) if n % pp == 0), 0)
        usual = _usual_vpp(dealt // pp) if interleaves and dealt else 1
        vpp = cells.assume("vpp", 2 if splits else 1 if schedule else usual)
    if pp * vpp > layers + 2:
        raise RowError(f"pp*vpp = {pp * vpp} is more than layers={layers} with embedding and head")
    if schedule in (None, "1f1b") and vpp > 1:
        schedule = "interleaved-1f1b"
    return schedule or "1f1b", max(1, vpp)


def _stage_blocks(cells: Cells, blocks: int, stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage as Megatron-LM's `--pipeline-model-parallel-layout` has them
    (``Et*4|(t*4|)*14tmL``): E the embedding, t a layer, m one that predicts ahead, L the head.
    """
    text = re.sub(r"[\s,]", "", cells.text("pp_layout"))
    if not text:
        return ()
    repeated = re.compile(r"\(([EtmL|]*)\)\*(\d{1,4})|([EtmL])\*(\d{1,4})")
    # From the inside out: a pass may leave another repetition around what it wrote out.
    while found := repeated.search(text):
        part = (found[1] or found[3] or "") * int(found[2] or found[4])
        text = text[: found.start()] + part + text[found.end() :]
    sizes = tuple(map(len, text.split("|")))
    if re.search(r"[^EtmL|]", text) or (sum(sizes), len(sizes)) != (blocks, stages):
        raise RowError(
            f"pp_layout={cells.text('pp_layout')} makes {len(sizes)} stages of {sum(sizes)} "
            f"blocks; the row has {stages} stages and {blocks} blocks"
        )
    return sizes


def _dtype(cells: Cells) -> str:
    named = cells.text("dtype")
    if not named:
        old = "V100" in cells.text("gpu").upper()
        return str(cells.assume("dtype", "float16" if old else "bfloat16"))
    dtype = dtype_of(named)
    if dtype is None:
        raise RowError(f"dtype {named!r} is not priced; use fp32, fp16, bf16 or fp8")
    return dtype


def _lora_rank(cells: Cells) -> int:
    """Return the rank that a column or the model's name (``Llama2-70B-LoRA-r16``) states."""
    given = cells.given("lora_rank", least=0)
    if given is not None:
        return given
    named = re.search(r"lora(?:\W*r(?:ank)?\W?(\d+))?", cells.text("model"), re.I)
    if named is None:
        return 0
    return int(named[1]) if named[1] else cells.assume("lora_rank", USUAL_LORA_RANK)


def _recompute(cells: Cells, stack: Execution) -> str:
    # ``none`` is a choice here, where in other columns it says nothing.
    value = cells.raw("recompute")
    known = recompute_of(value)
    if known is None:
        return str(cells.assume("recompute", stack.recompute))
    return known
