"""A run described by a row of a table, with every blank filled and the filling listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from costmodel.stacks import (
    DEEPSPEED_ZERO3,
    MEGATRON_CLASSIC,
    MEGATRON_DEEPSPEED,
    STACKS,
    Stack,
)
from costmodel.transformer import Split, TransformerShape
from planner.errors import PlannerError


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
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one dp replica; an uneven last one counts whole."""
        return max(1, ceil(self.global_batch / (self.dp * self.micro_batch)))


_DTYPES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
}


def parse_row(row: Mapping[str, Any]) -> RunRow:
    """Fill a row's blanks with the framework's usual choices.

    Raises RowError, in one line, when the row lacks the model's size or the layout, has
    experts, or its numbers do not divide.
    """
    assumed: list[str] = []

    def number(name: str, default: int | None = None) -> int:
        value = row.get(name)
        if not _blank(value):
            return _whole(name, value)
        if default is None:
            raise RowError(f"column {name} is blank; an estimate needs it")
        assumed.append(f"{name}={default}")
        return default

    if number("ep", 1) > 1:
        raise RowError("expert parallel runs are not described by these columns")
    stack = STACKS.get(str(row.get("stack") or ""))
    if stack is None:
        stack = _usual_stack(str(row.get("gpu") or ""))
        assumed.append(f"stack={stack.name}")
    if stack is MEGATRON_CLASSIC and number("zero_stage", 0):
        # Megatron's own distributed optimizer came later; ZeRO then was DeepSpeed's.
        stack = DEEPSPEED_ZERO3 if number("zero_stage", 0) == 3 else MEGATRON_DEEPSPEED
        assumed.append(f"stack={stack.name}")
    hidden, heads = number("hidden"), number("heads")
    gated = bool(number("gated_ffn", 0))
    shape = TransformerShape(
        layers=number("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("kv_heads", heads),
        ffn_hidden=number("ffn_hidden", 4 * hidden),
        gated=gated,
        vocab=number("vocab", 51200),
        seq_len=number("seq_len"),
    )
    tp, cp, pp = number("tp", 1), number("cp", 1), number("pp", 1)
    gpus = None if _blank(row.get("gpus")) else _whole("gpus", row["gpus"])
    dp = number("dp", None if gpus is None else max(1, gpus // (tp * cp * pp)))
    if gpus is not None and tp * cp * pp * dp != gpus:
        raise RowError(
            f"tp*cp*pp*dp = {tp * cp * pp * dp} does not equal gpus={gpus}; "
            "the layout is incomplete"
        )
    micro_batch = number("micro_batch", 1)
    dtype_name = str(row.get("dtype") if not _blank(row.get("dtype")) else "bf16")
    if dtype_name not in _DTYPES:
        raise RowError(f"dtype {dtype_name!r} is not priced; use one of {', '.join(_DTYPES)}")
    if shape.heads % tp:
        raise RowError(f"tp={tp} does not divide heads={shape.heads}")
    schedule = row.get("schedule")
    vpp = number("vpp", 1)
    if _blank(schedule):
        schedule = "interleaved-1f1b" if vpp > 1 else "1f1b"
    recompute = row.get("recompute")
    if _blank(recompute):
        recompute = stack.recompute
        assumed.append(f"recompute={recompute}")
    return RunRow(
        shape=shape,
        stack=stack,
        dtype=_DTYPES[dtype_name],
        global_batch=number("global_batch"),
        micro_batch=micro_batch,
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        sequence_parallel=bool(number("sp", int(stack.sequence_parallel and tp > 1))),
        zero_stage=number("zero_stage", stack.zero_stage),
        schedule=str(schedule),
        recompute=str(recompute),
        assumed=tuple(assumed),
    )


def _usual_stack(gpu: str) -> Stack:
    """Transformer Engine came with Hopper; before it, attention was unfused.

    A stack nobody named is not taken to recompute unless the row says so.
    """
    if any(word in gpu for word in ("V100", "A100", "A800")):
        return replace(STACKS["megatron-classic"], recompute="none")
    return STACKS["megatron-te"]


def _whole(name: str, value: Any) -> int:
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise RowError(f"column {name} holds {value!r}; it must be a number") from None


def _blank(value: Any) -> bool:
    return value is None or value == "" or value != value
