"""Reads a line of Megatron-LM's flags, by its table of options (`megatron_flags`).

Source: NVIDIA/Megatron-LM at d98e8a64ddf3 (2026-08-22), megatron/training/arguments.py, and
transformer/pipeline_parallel_layer_layout.py (cuts).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from planner.emit.megatron_flags import OPTIONS, Option
from planner.errors import PlannerError

SHELL_ENDS = frozenset({")", ";", "&", "&&", "|", "||"})
"""Words of a shell script that end a list of flags."""

_REDIRECTED = re.compile(r"\d*(?:>|<|&>)")
"""What a word begins with that says where a command's output goes."""

NEAR = 0.85
"""How much of a name an option's must be like for it to be a misspelling."""

MOST_REPEATED = 4096
"""The largest repetition in a layout of stages: what is written out must fit in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """A line of flags as read."""

    values: Mapping[str, int | float | str | bool]
    """By option; True for those that take no value."""
    unknown: tuple[str, ...]
    """Options that are not in `OPTIONS`, nor like one that is: another script's own."""
    broken: tuple[str, ...]
    """What is wrong with the line as it is written, each in a line."""
    script: str = ""
    """The Python file that stands before the first option."""

    def number(self, name: str, default: int = 1) -> int:
        """Return the value of an option that takes an int."""
        value = self.values.get(name, default)
        return value if isinstance(value, int) else default


def parse_flags(line: str) -> Flags:
    """Read a line of Megatron-style flags, ``--name value`` or ``--name=value``.

    Whatever stands before the first option (torchrun, a script) is left out, and so are options
    that are not known, with their words. A name that is like an option's, and none, is misspelled.
    Raises PlannerError where quotes do not end.
    """
    try:
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        words = [part for word in words for part in _parts(word)]
    except ValueError as error:
        raise PlannerError(f"the flags can't be read ({error}); close its quotes") from None
    values: dict[str, int | float | str | bool] = {}
    unknown, broken = [], []
    for name, given in _spelled(words):
        option = OPTIONS.get(name)
        if option is None:
            unknown.append(name)
            near = get_close_matches(name, OPTIONS, n=1, cutoff=NEAR)
            if near:
                broken.append(f"--{name} is no option of Megatron-LM; did you mean --{near[0]}?")
            continue
        trouble, value = _value(name, option, given)
        if name in values and values[name] != value and option.part != "none":
            broken.append(f"--{name} is given twice; the last, {' '.join(given)}, would count")
        if trouble:
            broken.append(trouble)
        else:
            values[name] = value
    return Flags(
        values=values,
        unknown=tuple(unknown),
        broken=tuple(broken),
        script=next((word for word in _before_options(words) if word.endswith(".py")), ""),
    )


def _parts(word: str) -> list[str]:
    """Return a word, or the words of an option that a script has quoted together with its value,
    which its shell takes apart where the array that holds it is used without quotes.
    """
    return shlex.split(word) if re.match(r"--[\w-]+\s", word) else [word]


def _before_options(words: list[str]) -> list[str]:
    """Return the words up to the last that ends in ``.py``; torchrun has options of its own."""
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    first = next((i for i, word in enumerate(words) if word[2:].partition("=")[0] in OPTIONS), 0)
    return [words[index] for index in scripts if index < first]


def _spelled(words: list[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    ended = False  # by the shell's own words, behind which no option's value stands
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            found.append((name, [value] if equals else []))
            ended = False
        elif word in SHELL_ENDS or _REDIRECTED.match(word):
            ended = True
        elif found and not ended:
            found[-1][1].append(word)
    return found


WORDS = {"": (1, 1), "+": (1, sys.maxsize), "*": (0, sys.maxsize), "3": (3, 3)}
"""The fewest and the most values of an option, by its `Option.words`."""

NEEDED_WORDS = {"": "one value", "+": "values", "*": "values", "3": "three values"}
"""How these are called."""

_NUMBERS: dict[str, Callable[[str], int | float]] = {"int": int, "float": float}


def _value(name: str, option: Option, given: list[str]) -> tuple[str, int | float | str | bool]:
    if not option.takes:
        return (f"--{name} takes no value; {' '.join(given)} was given" if given else ""), True
    fewest, most = WORDS[option.words]
    if not fewest <= len(given) <= most:
        needs = NEEDED_WORDS[option.words] if given else "a value"
        return f"--{name} takes {needs}; {' '.join(given) or 'none'} was given", True
    text = " ".join(given)
    if option.part == "none":
        return "", text
    if option.words:
        return "", text.strip("[]")
    if "$" in text and (option.choices or option.takes in _NUMBERS):
        return f"--{name} {text} is a variable of the shell; give its value", True
    if option.choices and text not in option.choices:
        return f"--{name} {text} was given; it takes {', '.join(option.choices)}", True
    if option.takes not in _NUMBERS:
        return "", text
    try:
        value = _NUMBERS[option.takes](text)
    except ValueError:
        return f"--{name} {text} was given; it takes a number", True
    if option.least is not None and value < option.least:
        return f"--{name} {text} was given; it takes a number of at least {option.least}", True
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
