"""A run described by a row of a table, with every blank filled and the filling listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any

from costmodel.execution import Execution
from costmodel.table.rows.named_models import (
    NamedModel,
    model_of_size,
    named_model,
    params_in_name,
)
from costmodel.table.rows.row_cells import Cells, RowError, real
from costmodel.table.rows.row_stack import seq_len_of, stack_of_row
from costmodel.table.rows.row_words import dtype_of, gated_of, recompute_of, schedule_of, zero_of
from costmodel.table.transformer import Split, TransformerShape

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

ACTIVE_PARAMS = re.compile(r"\d[bB]-?[aA]\d+(\.\d+)?[bB]")
"""A name such as ``80B-A3B`` says that few of its parameters see a token: its size alone tells
nothing of its layers."""

LEAST_PARAMS, MOST_PARAMS = 1e6, 1e14
"""Parameters of a model that is known only by their number."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run with every blank filled; `assumed` says with what."""

    shape: TransformerShape
    stack: Execution
    dtype: str
    global_batch: int
    micro_batch: int
    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    sequence_parallel: bool
    zero_stage: int
    schedule: str
    recompute: str
    ep: int = 1
    """Ranks of a stage that share the experts."""
    etp: int = 1
    """tp ranks that share each expert's matrices; 1: whole experts lie on tp ranks, too."""
    lora_rank: int = 0
    """Rank of the adapters that alone are trained, beside the attention's products; 0: all is."""
    assumed: tuple[str, ...] = field(default=())

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def split(self) -> Split:
        """How one microbatch lies on the ranks of a stage."""
        return Split(
            micro_batch=self.micro_batch,
            tp=self.tp,
            cp=self.cp,
            sequence_parallel=self.sequence_parallel,
            dtype=self.dtype,
            ep=self.data_ep,
        )

    @property
    def data_ep(self) -> int:
        """Ranks with other samples or positions that share the experts. Of experts on tp ranks
        each has as much as when tp splits them.
        """
        return self.ep if self.ep <= self.dp * self.cp or self.ep % self.tp else self.ep // self.tp

    def assumed_to_be(self, column: str) -> bool:
        """Whether a column was filled in."""
        return any(text.startswith(f"{column}=") for text in self.assumed)

    def assuming(self, **columns: Any) -> RunRow:
        """Return the run with other values of columns that were filled in."""
        told = [text for text in self.assumed if text.partition("=")[0] not in columns]
        told += [f"{name}={value}" for name, value in columns.items()]
        return replace(self, **columns, assumed=tuple(told))

    @property
    def hides_hops(self) -> bool:
        """Whether what stages send each other goes beside the work of other virtual stages."""
        return self.stack.overlaps_pp and self.vpp > 1

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
    shape = _shape(cells, stack)
    tp, cp, pp, dp = _layout(cells, shape, stack)
    _check_divides("tp", tp, "heads", shape.heads)
    if shape.ffn_hidden < tp:
        raise RowError(f"tp={tp} is more than ffn_hidden={shape.ffn_hidden}")
    ep = cells.given("ep", least=0) or 1
    if ep > dp * cp * tp:
        ep = cells.assume("ep", dp * cp * tp)
    if shape.num_experts > 1:
        _check_divides("ep", ep, "num_experts", shape.num_experts)
    # Where dp and cp ranks are too few, whole experts lie on tp ranks, too.
    etp = 1 if ep > dp * cp else _said_etp(cells) or tp
    batch, micro_batch = _batch(cells, shape, stack, pp=pp, dp=dp)
    interleaves = stack.interleaves and batch % (dp * micro_batch * pp) == 0
    schedule, vpp = _schedule(cells, layers=shape.layers, pp=pp, interleaves=interleaves)
    return RunRow(
        shape=shape,
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
        assumed=tuple(cells.assumed),
    )


def _said_etp(cells: Cells) -> int | None:
    """Return the tp ranks that share an expert's matrices, as a column or the notes say."""
    noted = re.search(r"\betp\s*=?\s*(\d+)", cells.text("notes"))
    return cells.given("etp") or (int(noted[1]) if noted else None)


def _check_divides(name: str, part: int, of: str, whole: int) -> None:
    if whole % part:
        raise RowError(f"{name}={part} does not divide {of}={whole}")


def _batch(
    cells: Cells, shape: TransformerShape, stack: Execution, *, pp: int, dp: int
) -> tuple[int, int]:
    """Return samples of a step and of a microbatch (see `_usual_micro_batch`)."""
    micro_batch = cells.given("micro_batch")
    number, tokens, _ = cells.text("global_batch").lower().partition("tok")
    if tokens and (count := real(number)):
        batch = cells.assume("global_batch", max(1, round(count / shape.seq_len)))
    else:
        batch = cells.given("global_batch")
    if batch is None:
        batch = dp * (micro_batch or 1) * (1 if pp == 1 else 4 * pp)
        cells.assume("global_batch", batch)
    most = max(1, ceil(batch / dp))
    if micro_batch is None:
        usual = _usual_micro_batch(shape, stack, samples=most, pp=pp)
        micro_batch = cells.assume("micro_batch", usual)
    elif micro_batch > most:
        micro_batch = cells.assume("micro_batch", most)
    return batch, micro_batch


def _usual_micro_batch(shape: TransformerShape, stack: Execution, *, samples: int, pp: int) -> int:
    """Return how many of a rank's samples usually go at once.

    Of FSDP without a pipeline all, as nothing is split. Else a power of two that divides them, of
    so many tokens as fill a device, fewer of a wide model, and leaves a pipeline two microbatches
    for each of its ranks.
    """
    if stack.zero_stage == 3 and stack.flash_attention and pp == 1:
        return samples
    tokens = USUAL_TOKENS * min(1.0, USUAL_TOKENS / shape.hidden)
    size = 1
    while 2 * size * shape.seq_len <= tokens and samples % (2 * size) == 0:
        if pp > 1 and samples // (2 * size) < 2 * pp:
            break
        size *= 2
    return size


def _zero_stage(cells: Cells, stack: Execution) -> int:
    stage = zero_of(cells.raw("zero_stage"))
    return cells.assume("zero_stage", stack.zero_stage) if stage is None else stage


def _shape(cells: Cells, stack: Execution) -> TransformerShape:
    known = named_model(cells.text("model"))

    def usual(name: str, otherwise: int | None) -> int | None:
        return otherwise if known is None else getattr(known, name)

    layers, hidden = cells.given("layers"), cells.given("hidden")
    num_experts = cells.given("num_experts", least=0) or 1
    if known is not None and (hidden is None or hidden == known.hidden):
        num_experts = max(num_experts, known.num_experts)
    else:
        known = None
    ep = cells.given("ep", least=0) or 1
    if ep > 1 and num_experts == 1:
        num_experts = cells.assume("num_experts", max(8, ep))
    params = real(cells.text("params_b").lower().removesuffix("b"))
    params = 1e9 * params if params else params_in_name(cells.text("model"))
    if known is None and hidden is None and ACTIVE_PARAMS.search(cells.text("model")):
        raise RowError(
            f"model {cells.text('model')!r} is not one we have the sizes of; give layers, hidden, "
            "num_experts and experts_per_token"
        )
    if known is None and hidden is None and params:
        if not LEAST_PARAMS <= params <= MOST_PARAMS:
            raise RowError(f"a model of {params:.3g} parameters is not priced")
        layers, hidden = model_of_size(params)
        cells.assume("layers", layers)
        cells.assume("hidden", hidden)
    hidden = cells.number("hidden", usual("hidden", None)) if hidden is None else hidden
    layers = cells.number("layers", usual("layers", None)) if layers is None else layers
    tp = cells.given("tp") or 1
    heads = cells.number("heads", usual("heads", tp * max(1, round(hidden / 128 / tp))))
    kv_heads = cells.number("kv_heads", usual("kv_heads", heads))
    _check_divides("kv_heads", kv_heads, "heads", heads)
    is_moe = num_experts > 1
    if is_moe and known is not None:
        # The column holds the width of dense layers, where there are any.
        ffn_hidden = known.ffn_hidden
    else:
        ffn_hidden = cells.number("ffn_hidden", usual("ffn_hidden", 4 * hidden))
    gated = gated_of(cells.text("gated_ffn"))
    if gated is None:
        gated = bool(cells.assume("gated_ffn", usual("gated_ffn", 0)))
    picked = cells.number("experts_per_token", usual("experts_per_token", 2)) if is_moe else 1
    if picked > num_experts:
        raise RowError(f"experts_per_token={picked} is more than num_experts={num_experts}")
    head_dim = cells.given("head_dim", least=0) or usual("head_dim", 0)
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn_hidden,
        gated=gated,
        vocab=cells.number("vocab", usual("vocab", 51200)),
        seq_len=seq_len_of(cells) or cells.assume("seq_len", stack.seq_len),
        head_dim=head_dim or max(1, hidden // heads),
        num_experts=num_experts,
        experts_per_token=picked,
        shared_experts=(usual("shared_experts", 0) or 0) if is_moe else 0,
        query_rank=usual("query_rank", 0) or 0,
        key_rank=usual("key_rank", 0) or 0,
        rope_dim=usual("rope_dim", 0) or 0,
        dense_layers=0 if known is None else _dense_layers(known, layers),
        dense_ffn=usual("dense_ffn", 0) or 0,
    )


def _dense_layers(known: NamedModel, layers: int) -> int:
    """Return the first layers without experts; of a shortened model as large a part, at least 1."""
    if layers >= known.layers or not known.dense_layers:
        return known.dense_layers
    return max(1, round(known.dense_layers * layers / known.layers))


def _layout(cells: Cells, shape: TransformerShape, stack: Execution) -> tuple[int, int, int, int]:
    """Return tp, cp, pp, dp; what is blank follows from the number of devices."""
    tp, pp, dp = (cells.given(name) for name in ("tp", "pp", "dp"))
    cp = cells.given("cp", least=0) or 1
    gpus = cells.given("gpus")
    needed = shape.num_params * TRAINED_BYTES / MODEL_BYTES_PER_DEVICE
    if gpus is None and dp is None:
        if nodes := cells.given("nodes"):
            gpus = cells.assume("gpus", DEVICES_PER_NODE * nodes)
        elif tp is pp is None:
            gpus = cells.assume("gpus", cp * 2 ** max(0, ceil(log2(needed))))
    if gpus is not None:
        _check_divides("cp", cp, "gpus", gpus)
    if gpus is not None and tp is None and pp is None and stack.zero_stage < 3:
        # Model parallel ranks: those dp leaves, else as few as hold the weights.
        ranks = gpus // (dp * cp) if dp else min(gpus // cp, ceil(needed))
        tp = _largest_divisor(gpus // cp, shape.heads, at_most=min(8, ranks))
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
