"""The table of Megatron-LM's options, and the page that is made of it.

After a change of the table, write the page anew:
WRITE_PAGES=1 pytest tests/emit/test_megatron_flags.py
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from planner.emit.megatron_flags import OPTIONS, Option
from planner.emit.megatron_flags.priced import CHOICES, MAY_BE_ZERO, PRICED
from planner.emit.megatron_flags.refused import REFUSED
from planner.emit.megatron_flags.unpriced import UNPRICED
from planner.emit.megatron_options import parse_flags
from tests.messages import ROOT
from tests.pages import check_page

INTRO = """# Megatron-LM's flags

What `planner check` makes of each of the {number} options that Megatron-LM reads
(NVIDIA/Megatron-LM at d98e8a64ddf3, 2026-08-22) or that its tests use beside them. {priced} are
priced, {refused} are refused by name, {none} are of no part in a price. A name that is like an
option's and is none is told with the nearest; what is like none is another script's own, is named
and left out.

N stands for a whole number, X for another one, W for a word; + for one or more values, * for any
number of them.

This page is written by `WRITE_PAGES=1 pytest tests/emit/test_megatron_flags.py` from
`planner/emit/megatron_flags`.
"""

HEADS = {
    "priced": """## Priced

By what of a price follows from them. Values that are not priced are refused by name
(`planner/emit/megatron_refusals.py`).
""",
    "refused": """## Refused

A price would be wrong: such a line ends with exit code 2. With the values in brackets an option
says nothing, and is read past.
""",
    "none": """## Of no part

By why a price is the same with them. They are read, and not told.
""",
}

WORDS = {"int": "N", "float": "X", "str": "W", "": ""}


def spelled(name: str, option: Option) -> str:
    """Return an option as it is written, with what its values are."""
    value = "\\|".join(option.choices) or WORDS[option.takes]
    several = {"": "", "+": "+", "*": "*", "3": f" {value} {value}"}[option.words]
    return f"`--{name}" + (f" {value}{several}`" if value else "`")


def page() -> str:
    """Return the page's text."""
    counts = Counter(option.part for option in OPTIONS.values())
    parts = [INTRO.format(number=len(OPTIONS), **counts)]
    for part, head in HEADS.items():
        by_why: dict[str, list[str]] = defaultdict(list)
        for name, option in OPTIONS.items():
            if option.part == part:
                harmless = f" ({', '.join(option.harmless)})" if option.harmless else ""
                by_why[option.why].append(spelled(name, option).replace("\\|", " or ") + harmless)
        rows = [f"| {why} | {', '.join(sorted(names))} |" for why, names in by_why.items()]
        title = "| what | options |" if part == "priced" else "| why | options |"
        parts.append("\n".join([head, title, "|---|---|", *rows, ""]))
    return "\n".join(parts)


def test_the_page_of_flags_is_up_to_date():
    check_page(ROOT / "docs" / "megatron-flags.md", page())


def test_no_option_is_of_two_parts():
    names = [
        name
        for table in (PRICED, UNPRICED)
        for kinds in table.values()
        for text in kinds.values()
        for name in text.split()
    ]
    twice = [name for name, count in Counter([*names, *REFUSED]).items() if count > 1]
    assert not twice
    assert len(OPTIONS) == len(names) + len(REFUSED)
    assert set(CHOICES) <= set(names)
    assert set(MAY_BE_ZERO) <= set(names)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--save /a --load=/b", {"save": "/a", "load": "/b"}),
        ("--data-path", {"data-path": ""}),
        ("--data-path 0.5 a 0.5 b --bf16", {"data-path": "0.5 a 0.5 b", "bf16": True}),
        ("--rampup-batch-size 1 2 300", {"rampup-batch-size": "1 2 300"}),
        ("--recompute-modules [moe_act mlp]", {"recompute-modules": "moe_act mlp"}),
        ("--lr $LR --hidden-dropout 0.5", {"lr": "$LR", "hidden-dropout": 0.5}),
        ("--mtp-num-layers 0 --seed -1", {"mtp-num-layers": 0, "seed": "-1"}),
    ],
)  # fmt: skip
def test_every_option_is_read_with_its_values(line, values):
    flags = parse_flags(line)
    assert dict(flags.values) == values
    assert not flags.broken


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "--q-lora-ranks 4",
            "--q-lora-ranks is no option of Megatron-LM; did you mean --q-lora-ra",
        ),
        ("--moe-layers-freq 1", "did you mean --moe-layer-freq?"),
        ("--save", "--save takes a value; none was given"),
        ("--save a b", "--save takes one value; a b was given"),
        ("--mock-data 1", "--mock-data takes no value; 1 was given"),
        ("--recompute-modules", "--recompute-modules takes a value; none was given"),
    ],
)
def test_what_is_wrong_with_a_line_is_told(line, told):
    (broken,) = parse_flags(line).broken
    assert told in broken


def test_options_of_other_scripts_are_named_and_left_out():
    flags = parse_flags("--my-own-thing 3 --bf16")
    assert flags.unknown == ("my-own-thing",)
    assert not flags.broken


def test_the_script_before_the_options_is_read():
    line = "torchrun --nproc-per-node 8 a/pretrain_gpt.py --bf16 --tokenizer-metadata b.py"
    assert parse_flags(line).script == "a/pretrain_gpt.py"
    assert parse_flags("--bf16").script == ""
