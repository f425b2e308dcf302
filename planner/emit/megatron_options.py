"""Megatron-LM's options that a plan or a check of flags reads: their types, choices and rules.

Source: NVIDIA/Megatron-LM at d98e8a64ddf3 (2026-08-22), megatron/training/arguments.py (options,
`validate_args`), megatron/core/transformer/transformer_config.py and parallel_state.py (what must
divide what), transformer/pipeline_parallel_layer_layout.py (cuts).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from planner.errors import PlannerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of Megatron-LM's command line."""

    takes: str
    """``int``, ``float``, ``str``, or "" where it takes no value."""
    choices: tuple[str, ...] = ()
    """The values it may have; any where empty."""


def _options(takes: str, names: str) -> dict[str, Option]:
    return {name: Option(takes=takes) for name in names.split()}


OPTIONS: dict[str, Option] = {
    **_options(
        "int",
        "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels "
        "seq-length max-position-embeddings micro-batch-size global-batch-size num-experts "
        "moe-router-topk moe-ffn-hidden-size tensor-model-parallel-size "
        "pipeline-model-parallel-size context-parallel-size expert-model-parallel-size "
        "expert-tensor-parallel-size num-layers-per-virtual-pipeline-stage "
        "num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers "
        "decoder-last-pipeline-num-layers recompute-num-layers vocab-size "
        "make-vocab-size-divisible-by",
    ),
    **_options("float", "optimizer-offload-fraction"),
    **_options("str", "pipeline-model-parallel-layout cp-comm-type ckpt-format recompute-modules"),
    **_options(
        "",
        "sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather "
        "use-megatron-fsdp bf16 fp16 optimizer-cpu-offload use-precision-aware-optimizer "
        "untie-embeddings-and-output-weights group-query-attention swiglu recompute-activations "
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split "
        "use-flash-attn tp-comm-overlap no-overlap-p2p-communication",
    ),
    "recompute-granularity": Option(takes="str", choices=("full", "selective")),
    "recompute-method": Option(takes="str", choices=("uniform", "block")),
    "data-parallel-sharding-strategy": Option(
        takes="str", choices=("no_shard", "optim", "optim_grads", "optim_grads_params")
    ),
    "fp8-format": Option(takes="str", choices=("e4m3", "hybrid")),
    "normalization": Option(takes="str", choices=("LayerNorm", "RMSNorm")),
}
"""Options by name."""

TAKES_MANY = frozenset({"cp-comm-type", "recompute-modules"})
"""Options whose values are all words up to the next option."""


SHELL_ENDS = frozenset({")", ";", "&", "&&", "|", "||"})
"""Words of a shell script that end a list of flags."""

MOST_REPEATED = 4096
"""The largest repetition in a layout of stages: what is written out must fit in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """A line of flags as read."""

    values: Mapping[str, int | float | str | bool]
    """By option; True for those that take no value."""
    unknown: tuple[str, ...]
    """Options that are not in `OPTIONS`: they are Megatron-LM's other options, or misspelled."""
    broken: tuple[str, ...]
    """What is wrong with the line as it is written, each in a line."""

    def number(self, name: str, default: int = 1) -> int:
        """Return the value of an option that takes an int."""
        value = self.values.get(name, default)
        return value if isinstance(value, int) else default


def parse_flags(line: str) -> Flags:
    """Read a line of Megatron-style flags, ``--name value`` or ``--name=value``.

    Whatever stands before the first option (torchrun, a script) is left out, and so are options
    that are not known, with their words. Raises PlannerError where quotes do not end.
    """
    try:
        words = shlex.split(line.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlannerError(f"the flags can't be read ({error}); close its quotes") from None
    values: dict[str, int | float | str | bool] = {}
    unknown, broken = [], []
    for name, given in _spelled(words):
        option = OPTIONS.get(name)
        if option is None:
            unknown.append(name)
            near = get_close_matches(name, OPTIONS, n=1, cutoff=0.9)
            if near:
                broken.append(f"--{name} is no option of Megatron-LM; did you mean --{near[0]}?")
            continue
        if name in values:
            broken.append(f"--{name} is given twice; the last, {' '.join(given)}, would count")
        trouble, value = _value(name, option, given)
        if trouble:
            broken.append(trouble)
        else:
            values[name] = value
    return Flags(values=values, unknown=tuple(unknown), broken=tuple(broken))


def _spelled(words: list[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    ended = False  # by the shell's own words, behind which no option's value stands
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            found.append((name, [value] if equals else []))
            ended = False
        elif word in SHELL_ENDS:
            ended = True
        elif found and not ended:
            found[-1][1].append(word)
    return found


_NUMBERS: dict[str, Callable[[str], int | float]] = {"int": int, "float": float}


def _value(name: str, option: Option, given: list[str]) -> tuple[str, int | float | str | bool]:
    if not option.takes:
        return (f"--{name} takes no value; {' '.join(given)} was given" if given else ""), True
    if not given or (len(given) > 1 and name not in TAKES_MANY):
        needs = "a value" if not given else "one value"
        return f"--{name} takes {needs}; {' '.join(given) or 'none'} was given", True
    text = " ".join(given)
    if option.choices and text not in option.choices:
        return f"--{name} {text} was given; it takes {', '.join(option.choices)}", True
    if option.takes not in _NUMBERS:
        return "", text
    try:
        value = _NUMBERS[option.takes](text)
    except ValueError:
        return f"--{name} {text} was given; it takes a number", True
    if value < 1 and option.takes == "int":
        return f"--{name} {text} was given; it takes a number of at least 1", True
    return "", value


def stages_of_layout(text: str) -> list[str]:
    """Return the stages of ``--pipeline-model-parallel-layout``, repetitions written out.

    Raises PlannerError for letters that are no part of a model.
    """
    text = text.replace(",", "")
    if any(int(times) > MOST_REPEATED for times in re.findall(r"\d+", text)):
        raise PlannerError(
            f"--pipeline-model-parallel-layout repeats more than {MOST_REPEATED} times; no model "
            "has so many layers"
        )
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    wrong = set(text) - set("EtmL|")
    if wrong:
        raise PlannerError(
            f"--pipeline-model-parallel-layout has {min(wrong)!r}; it is written with E "
            "(embedding), t (layer), m (multi-token prediction), L (loss), | between stages, and * "
            "behind a letter or a bracket"
        )
    return text.split("|")
