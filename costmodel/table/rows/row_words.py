"""Cells of rows: numbers and words as people write them, what blank ones were taken to be, and what
frameworks call their stacks, dtypes, schedules and recompute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from costmodel.execution import Execution, execution_names, find_execution
from costmodel.table.kernels import FOUR_BITS
from planner.errors import PlannerError

Word = TypeVar("Word")
"""What a word stands for."""

BLANK = {"", "-", "?", "none", "nan", "n/a", "na", "null", "unknown", "auto", "default"}
"""Texts that say nothing; `recompute` alone may say ``none``."""

_STACKS = (
    (r"deepspeed.*(zero.?3|stage.?3)|zero.?3", "deepspeed-zero3"),
    (r"deepspeed|bigscience|neox", "megatron-deepspeed"),
    (r"nemo|bridge|mcore|\bcore|transformer.?engine|\bte\b|megascale", "megatron-core"),
    (r"fsdp|titan|foundry|mosaic|composer|lightning|litgpt|hugging|accelerate", "fsdp-flash"),
    (r"\bddp\b|pytorch|nanogpt|llm\.c|olmo|jax|maxtext|paxml|levanter|\bxla\b", "fsdp-flash"),
    (r"nanotron|picotron|interne?vo|internlm|colossal|nnscaler|galvatron", "eager-flash"),
    (r"megatron", "megatron-classic"),
)
_DTYPES = (
    (r"fp4", FOUR_BITS),
    (r"mxfp|fp8|float8|e4m3|e5m2|int8", "float8_e4m3fn"),
    (r"bf16|bfloat16|bf-16", "bfloat16"),
    (r"fp16|float16|half|amp|mixed", "float16"),
    (r"tf32|fp32|float32|single", "float32"),
)
_RECOMPUTES = (
    (r"^(none|no|off|false|0|0\.0|disabled)$|^(no|without|disabled)\b", "none"),
    (r"select|attn|attention|core|\bop\b|sac|partial", "selective"),
    (r"full|uniform|block|yes|true|^1(\.0)?$|all|checkpoint|\bac\b|on$", "full"),
)
RECOMPUTED_MODULES = {
    "core_attn": ("core_attention", "softmax", "attention_dropout"),
    "layernorm": ("input_layernorm", "pre_mlp_layernorm"),
    "mla_up_proj": ("q_up", "kv_up", "rotary"),
    "moe_act": ("experts.act",),
    "shared_experts": ("shared_experts.fc1", "shared_experts.act", "shared_experts.fc2"),
    "mlp": ("mlp.fc1", "mlp.act", "mlp.fc2"),
    "moe": ("router", "permute", "experts", "experts.act", "unpermute"),
}
"""Modules of ours that each of Megatron-LM's `--recompute-modules` runs again
(megatron/core/transformer/transformer_config.py, core_v0.15.0); core_attn where a row says
selective and names none (Korthikanti et al. 2022)."""
DISCARDING = frozenset({"layernorm", "mla_up_proj", "moe_act"})
"""Those of them whose results are discarded and made again, with all views of them; results of
others stay for what takes them (transformer_config.py, recompute_modules)."""
_ZEROS = (
    (r"^(none|no|off|false|ddp|dp)$", 0),
    (r"(?<![\d.])0", 0),
    # FSDP's word for a strategy, or ZeRO's number, tells more than "fsdp" itself.
    (r"no.?shard", 0),
    (r"shard.?grad|(zero|stage)[-_ ]?2", 2),
    (r"(zero|stage)[-_ ]?1", 1),
    (r"hybrid|full.?shard|fsdp|(?<![\d.])[3-9]", 3),
    (r"(?<![\d.])2", 2),
    (r"distributed|optimizer|^(yes|on|true)$|(?<![\d.])1", 1),
)
_GATED = (
    (r"(un|non|not|no)[-_ ]?gated", False),
    (r"glu|gated|^(yes|on|true)$", True),
    (r"lu|tanh|plain|^(no|off|false)$", False),
)
_SCHEDULES = (
    (r"zb.?v|v.?schedule|dualpipe|v.?half", "zb-v"),
    (r"zb.?(2p|h2)", "zb-2p"),
    (r"zb|zero.?bubble", "zb-1p"),
    (r"(non|not|no|without)[-_ ]?interleav", "1f1b"),
    (r"interleav|vpp|virtual|loop|circular", "interleaved-1f1b"),
    (r"gpipe|fthenb|afab|all.?forward", "gpipe"),
    (r"1f1b|dapple|pipedream|flush", "1f1b"),
)


def is_blank(value: Any) -> bool:
    """Whether a cell says nothing."""
    return value is None or value != value or str(value).strip().lower() in BLANK


def stack_of(text: str) -> Execution | None:
    """Return the execution that a framework's name stands for."""
    said = text.strip().lower()
    name = said if said in execution_names() else _first(_STACKS, text)
    return find_execution(name) if name else None


def dtype_of(text: str) -> str | None:
    """Return torch's name of the products' dtype."""
    return _first(_DTYPES, text)


def recompute_of(text: str) -> str | None:
    """Return ``none``, ``selective`` (``selective: moe_act, layernorm`` where it names modules) or
    ``full``.
    """
    known = _first(_RECOMPUTES, text)
    named = [word for word in re.split(r"\W+", text.lower()) if word in RECOMPUTED_MODULES]
    return f"{known}: {', '.join(named)}" if known == "selective" and named else known


def modules_recomputed(recompute: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules of our templates that a selective recomputation runs again: all of them,
    and those whose results are discarded.
    """
    named = recompute.partition(":")[2].replace(",", " ").split() or ["core_attn"]
    discarding = [name for name in named if name in DISCARDING]
    again, discarded = (
        tuple(part for name in names for part in RECOMPUTED_MODULES[name])
        for names in (named, discarding)
    )
    return again, discarded


def schedule_of(text: str) -> str | None:
    """Return the schedule's name here."""
    return _first(_SCHEDULES, text)


def zero_of(text: str) -> int | None:
    """Return the stage of ZeRO that a number or a word names."""
    return None if is_blank(text) and text.lower() != "none" else _first(_ZEROS, text)


def gated_of(text: str) -> bool | None:
    """Return whether a number or a word names a feed-forward with three matrices."""
    number = re.fullmatch(r"\d+(\.0*)?", text)
    return float(number[0]) > 0 if number else _first(_GATED, text)


def _first(words: tuple[tuple[str, Word], ...], text: str) -> Word | None:
    lower = text.strip().lower()
    return next((name for pattern, name in words if re.search(pattern, lower)), None)


LARGEST = 10**9
"""No count of a run is larger; what is was meant otherwise."""

_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([kmbt]?)", re.I)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_WORDS = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}


class RowError(PlannerError):
    """A row lacks what an estimate needs, or contradicts itself."""


class Cells:
    """A row's cells; `assumed` lists what blank ones were taken to be."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        """Return a cell's text, empty when it says nothing."""
        value = self._row.get(name)
        return "" if is_blank(value) else str(value).strip()

    def raw(self, name: str) -> str:
        """Return a cell's text, also a word such as ``none``."""
        value = self._row.get(name)
        return "" if value is None or value != value else str(value).strip()

    def given(self, name: str, *, least: int = 1, thousand: int = 1000) -> int | None:
        """Return a whole number, or None where the cell is blank.

        `thousand` is what a ``k`` stands for. Raises RowError for other words, for parts of a
        whole, and for numbers below `least` or that no run has.
        """
        text = self.text(name)
        if not text:
            return None
        number = _WORDS.get(text.lower(), real(text, thousand=thousand))
        if number is None:
            raise RowError(f"column {name} holds {text!r}; it must be a number")
        if number != int(number):
            raise RowError(f"{name}={text} must be a whole number")
        if number < least:
            raise RowError(f"{name}={int(number)} must be at least {least}")
        if number > LARGEST:
            raise RowError(f"{name}={number:g} is more than any run has ({LARGEST:g})")
        return int(number)

    def number(self, name: str, usual: int | None, *, least: int = 1) -> int:
        """Return a cell's whole number, or the usual one, and note it."""
        value = self.given(name, least=least)
        if value is None and usual is None:
            raise RowError(f"column {name} is blank; an estimate needs it")
        return self.assume(name, usual) if value is None else value

    def assume(self, name: str, value: Any) -> Any:
        """Note what a column was taken to be, and return it."""
        self.assumed.append(f"{name}={value}")
        return value


def real(text: str, *, thousand: int = 1000) -> float | None:
    """Return the number that a text is, such as ``1,024``, ``8k`` or ``7B``; None for words."""
    found = _NUMBER.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None:
        return None
    scale = thousand if found[2].lower() == "k" else _SCALES[found[2].lower()]
    number = float(found[1]) * scale
    return number if abs(number) < 1e18 else None
