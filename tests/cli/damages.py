"""Damage to files, drawn at random from a seed: bytes, JSON values and CSV cells."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# What a JSON value may be replaced by: other types, and numbers at the ends of what there is.
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "x",
        "R",
        "S(9)",
        "S(0)x3",
        "P,R->R",
        "1",
        [],
        {},
        [[]],
        [1],
        {"a": 1},
    ),
    *(0, -1, 1, 2, 3, 7, 10**6, 2**31, 10**9, 2**63, 10**30, 10**400),
    *(0.0, -0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")),
)
_CELLS = (
    "",
    "x",
    "-1",
    "0",
    "nan",
    "inf",
    "1e308",
    "1e400",
    "9" * 400,
    "[",
    "[[]]",
    "[1,null]",
    '"',
)
_BYTES = (
    b"\xff\xfe",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\xc3",
    b"\n",
    b'"',
    b"{",
    b"]",
    b",",
    b"9" * 5000,
)


def damaged_json(text: str, draw: random.Random) -> bytes:
    """Return a JSON document with one to three random damages."""
    if draw.random() < 0.3:
        return damaged_bytes(text.encode(), draw)
    data = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        draw.choice(_JSON_DAMAGES)(data, draw)
    return json.dumps(data).encode()


def damaged_csv(text: str, draw: random.Random) -> bytes:
    """Return a CSV file with one random damage."""
    if draw.random() < 0.3:
        return damaged_bytes(text.encode(), draw)
    lines = text.split("\n")
    number = draw.randrange(len(lines) - 1)
    cells = lines[number].split(",")
    kind = draw.choice(("cell", "cell", "cell", "drop", "add", "line", "twice"))
    at = draw.randrange(len(cells))
    if kind == "cell":
        cells[at] = draw.choice(_CELLS)
    elif kind == "drop":
        del cells[at]
    elif kind == "add":
        cells.insert(at, draw.choice(_CELLS))
    lines[number : number + 1] = (
        [] if kind == "line" else [",".join(cells)] * (2 if kind == "twice" else 1)
    )
    return "\n".join(lines).encode()


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return a file cut short, with bytes changed, or with some put in."""
    at = draw.randrange(len(content))
    kind = draw.choice(("cut", "flip", "flip", "put", "nested", "nothing"))
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 4))):
            changed[draw.randrange(len(content))] = draw.randrange(256)
        return bytes(changed)
    if kind == "put":
        return content[:at] + draw.choice(_BYTES) + content[at:]
    if kind == "nested":
        depth = draw.choice((50, 5_000, 200_000))
        return content[:at] + b"[" * depth + b"]" * depth + content[at:]
    return b""


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) in a document."""
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found


def _shallow(data: Any, draw: random.Random) -> tuple[Any, Any]:
    """Draw a place: any with equal chance, or down from the top, where few hold much."""
    if draw.random() < 0.3:
        return draw.choice(_places(data))
    container = data
    while True:
        key = draw.choice(list(container)) if isinstance(container, dict) else None
        key = draw.randrange(len(container)) if key is None else key
        value = container[key]
        if not isinstance(value, dict | list) or not value or draw.random() < 0.2:
            return container, key
        container = value


def _replace(data: Any, draw: random.Random) -> None:
    container, key = _shallow(data, draw)
    container[key] = copy.deepcopy(draw.choice(_VALUES))


def _scale(data: Any, draw: random.Random) -> None:
    numbers = [
        (container, key)
        for container, key in _places(data)
        if isinstance(container[key], int | float) and not isinstance(container[key], bool)
    ]
    container, key = draw.choice(numbers)
    container[key] = draw.choice((-1, 2, 3, 1000, 10**12)) * container[key] + draw.choice((0, 1))


def _drop(data: Any, draw: random.Random) -> None:
    container, key = _shallow(data, draw)
    del container[key]


def _repeat(data: Any, draw: random.Random) -> None:
    lists = [value for c, k in _places(data) if isinstance(value := c[k], list) and value]
    if lists:
        chosen = draw.choice(lists)
        at = draw.randrange(len(chosen))
        chosen[at:at] = [copy.deepcopy(chosen[at]) for _ in range(draw.choice((1, 1, 2, 100)))]


def _swap(data: Any, draw: random.Random) -> None:
    (parent, a), (other, b) = _shallow(data, draw), _shallow(data, draw)
    # (What holds the other would hold itself.)
    first, second = copy.deepcopy(parent[a]), copy.deepcopy(other[b])
    parent[a] = second
    if b in other if isinstance(other, dict) else b < len(other):
        other[b] = first


def _rename(data: Any, draw: random.Random) -> None:
    containers = [c for c, _ in _places(data) if isinstance(c, dict)]
    chosen = draw.choice(containers)
    key = draw.choice(list(chosen))
    chosen[key + draw.choice(("_s", "x", " "))] = chosen.pop(key)


_JSON_DAMAGES: tuple[Callable[[Any, random.Random], None], ...] = (
    *(_replace, _replace, _replace, _scale, _drop, _repeat, _swap, _rename),
)
