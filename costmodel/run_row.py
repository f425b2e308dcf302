"""A run described by a row of a table, with every blank filled and the filling listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from costmodel.named_models import model_of_size, named_model
from costmodel.row_words import dtype_of, is_blank, recompute_of, schedule_of, stack_of
from costmodel.stacks import (
    DEEPSPEED_ZERO3,
    FSDP_FLASH,
    MEGATRON_CLASSIC,
    MEGATRON_DEEPSPEED,
    MEGATRON_TE,
    Stack,
)
from costmodel.transformer import Split, TransformerShape
from planner.errors import PlannerError

MODEL_BYTES_PER_DEVICE = 40e9
"""What weights and optimizer state may take of a device where a row leaves its layout open."""

TRAINED_BYTES = 18
"""Bytes of a parameter with its gradient, master weight and Adam's two moments."""


class RowError(PlannerError):
    """A row lacks what an estimate needs, or contradicts itself."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run with every blank filled; `assumed` says with what."""

    shape: TransformerShape
    stack: Stack
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
            ep=self.ep,
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one dp replica; an uneven last one counts whole."""
        return max(1, ceil(self.global_batch / (self.dp * self.micro_batch)))


class _Cells:
    """A row's cells, and a list of what blank ones were taken to be."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        value = self._row.get(name)
        return "" if is_blank(value) else str(value).strip()

    def raw(self, name: str) -> str:
        value = self._row.get(name)
        return "" if value is None or value != value else str(value).strip()

    def given(self, name: str) -> int | None:
        value = self._row.get(name)
        return None if is_blank(value) else _whole(name, value)

    def number(self, name: str, usual: int | None) -> int:
        value = self.given(name)
        if value is None and usual is None:
            raise RowError(f"column {name} is blank; an estimate needs it")
        return self.assume(name, usual) if value is None else value

    def assume(self, name: str, value: Any) -> Any:
        self.assumed.append(f"{name}={value}")
        return value


def parse_row(row: Mapping[str, Any]) -> RunRow:
    """Fill a row's blanks with the framework's usual choices.

    Raises RowError, in one line, when the row lacks the model's size, or its numbers do not
    divide.
    """
    cells = _Cells(row)
    stack = _stack(cells)
    shape = _shape(cells, stack)
    tp, cp, pp, dp = _layout(cells, shape, stack)
    if shape.heads % tp:
        raise RowError(f"tp={tp} does not divide heads={shape.heads}")
    schedule, vpp = _schedule(cells, layers=shape.layers, pp=pp)
    # Of FSDP without a pipeline, all samples of a rank go at once, as nothing is split.
    micro_batch = cells.given("micro_batch")
    batch = cells.given("global_batch")
    if batch is None:
        batch = dp * (micro_batch or 1) * (1 if pp == 1 else 4 * pp)
        cells.assume("global_batch", batch)
    if micro_batch is None:
        whole = stack is FSDP_FLASH and pp == 1
        micro_batch = cells.assume("micro_batch", max(1, batch // dp) if whole else 1)
    for name, value in (("global_batch", batch), ("micro_batch", micro_batch)):
        if value < 1:
            raise RowError(f"{name}={value} must be at least 1")
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
        ep=cells.given("ep") or 1,
        sequence_parallel=bool(cells.number("sp", int(stack.sequence_parallel and tp > 1))),
        zero_stage=min(3, max(0, cells.number("zero_stage", stack.zero_stage))),
        schedule=schedule,
        recompute=_recompute(cells, stack),
        assumed=tuple(cells.assumed),
    )


def _stack(cells: _Cells) -> Stack:
    stack = stack_of(cells.text("stack"))
    if stack is None:
        stack = _usual_stack(cells)
        cells.assume("stack", stack.name)
    zero_stage = cells.given("zero_stage") or 0
    if stack is MEGATRON_CLASSIC and zero_stage:
        # Megatron's own distributed optimizer came later; ZeRO then was DeepSpeed's.
        stack = DEEPSPEED_ZERO3 if zero_stage == 3 else MEGATRON_DEEPSPEED
        cells.assume("stack", stack.name)
    return stack


def _usual_stack(cells: _Cells) -> Stack:
    """Transformer Engine came with Hopper; before it, attention was unfused.

    Gated models and long sequences came with fused attention, whatever the device; ZeRO 3 with
    it is FSDP. A stack nobody named is not taken to recompute unless the row says so.
    """
    gpu = cells.text("gpu").upper()
    modern = bool(cells.given("gated_ffn")) or (cells.given("seq_len") or 0) > 2048
    if not any(word in gpu for word in ("V100", "A100", "A800")) or modern:
        return FSDP_FLASH if cells.given("zero_stage") == 3 else MEGATRON_TE
    return replace(MEGATRON_CLASSIC, recompute="none")


def _shape(cells: _Cells, stack: Stack) -> TransformerShape:
    known = named_model(cells.text("model"))

    def usual(name: str, otherwise: int | None) -> int | None:
        return otherwise if known is None else getattr(known, name)

    layers, hidden = cells.given("layers"), cells.given("hidden")
    num_experts = cells.given("num_experts") or 1
    if known is not None and (hidden is None or hidden == known.hidden):
        num_experts = max(num_experts, known.num_experts)
    else:
        known = None
    if (cells.given("ep") or 1) > 1 and num_experts == 1:
        num_experts = cells.assume("num_experts", max(8, cells.given("ep") or 1))
    params = _real(cells.text("params_b"))
    if known is None and hidden is None and params:
        layers, hidden = model_of_size(1e9 * params)
        cells.assume("layers", layers)
        cells.assume("hidden", hidden)
    hidden = cells.number("hidden", usual("hidden", None)) if hidden is None else hidden
    layers = cells.number("layers", usual("layers", None)) if layers is None else layers
    tp = cells.given("tp") or 1
    heads = cells.number("heads", usual("heads", tp * max(1, round(hidden / 128 / tp))))
    is_moe = num_experts > 1
    if is_moe and known is not None:
        # The column holds the width of dense layers, where there are any.
        ffn_hidden = known.ffn_hidden
    else:
        ffn_hidden = cells.number("ffn_hidden", usual("ffn_hidden", 4 * hidden))
    shape = TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=cells.number("kv_heads", usual("kv_heads", heads)),
        ffn_hidden=ffn_hidden,
        gated=bool(cells.number("gated_ffn", usual("gated_ffn", 0))),
        vocab=cells.number("vocab", usual("vocab", 51200)),
        seq_len=cells.number("seq_len", stack.seq_len),
        head_dim=cells.given("head_dim") or usual("head_dim", 0) or max(1, hidden // heads),
        num_experts=num_experts,
        experts_per_token=_experts_per_token(cells, usual("experts_per_token", 2), is_moe=is_moe),
        shared_experts=(usual("shared_experts", 0) or 0) if is_moe else 0,
    )
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len"):
        if getattr(shape, name) < 1:
            raise RowError(f"{name}={getattr(shape, name)} must be at least 1")
    return shape


def _experts_per_token(cells: _Cells, usual: int | None, *, is_moe: bool) -> int:
    return cells.number("experts_per_token", usual) if is_moe else 1


def _layout(cells: _Cells, shape: TransformerShape, stack: Stack) -> tuple[int, int, int, int]:
    """Return tp, cp, pp, dp; what is blank follows from the number of devices."""
    tp, pp, dp = (cells.given(name) for name in ("tp", "pp", "dp"))
    cp = cells.given("cp") or 1
    gpus = cells.given("gpus")
    if gpus is not None and tp is None and pp is None and stack.zero_stage < 3:
        # Model parallel ranks: those dp leaves, else as few as hold the weights.
        needed = shape.num_params * TRAINED_BYTES / MODEL_BYTES_PER_DEVICE
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
    for name, value in (("tp", tp), ("cp", cp), ("pp", pp)):
        if value < 1:
            raise RowError(f"{name}={value} must be at least 1")
    if dp is None and gpus is None:
        raise RowError("columns dp and gpus are blank; an estimate needs one of them")
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


def _schedule(cells: _Cells, *, layers: int, pp: int) -> tuple[str, int]:
    named = cells.text("schedule")
    schedule, vpp = schedule_of(named), cells.given("vpp")
    if named and schedule is None:
        cells.assume("schedule", "from vpp")
    if vpp is None:
        splits = schedule == "interleaved-1f1b" and pp > 1 and layers // pp >= 2
        vpp = cells.assume("vpp", 2 if splits else 1)
    if pp == 1:
        return "1f1b", 1
    if schedule in (None, "1f1b") and vpp > 1:
        schedule = "interleaved-1f1b"
    return schedule or "1f1b", max(1, vpp)


def _dtype(cells: _Cells) -> str:
    named = cells.text("dtype")
    if not named:
        return "float16" if "V100" in cells.text("gpu").upper() else "bfloat16"
    dtype = dtype_of(named)
    if dtype is None:
        raise RowError(f"dtype {named!r} is not priced; use fp32, fp16, bf16 or fp8")
    return dtype


def _recompute(cells: _Cells, stack: Stack) -> str:
    # ``none`` is a choice here, where in other columns it says nothing.
    value = cells.raw("recompute")
    known = recompute_of(value)
    if known is None:
        return str(cells.assume("recompute", stack.recompute))
    return known


def _whole(name: str, value: Any) -> int:
    if str(value).strip().lower() in ("true", "yes", "on"):
        return 1
    if str(value).strip().lower() in ("false", "no", "off"):
        return 0
    number = _real(str(value))
    if number is None:
        raise RowError(f"column {name} holds {value!r}; it must be a number")
    return int(number)


def _real(text: str) -> float | None:
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return number if abs(number) < 1e18 else None
