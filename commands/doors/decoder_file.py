"""The model file of a decoder that is known by its sizes."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from planner.language.templates import Experts, Latent, Transformer


def decoder_file(title: str, sizes: Transformer) -> str:
    """Return the text of a model file; `title` is a line that says whose the model is."""
    parts = [kind.__name__ for kind in (Experts, Latent) if _has(sizes, kind)]
    imports = ", ".join([*parts, "Transformer"])
    return "\n".join(
        [
            f'"""{title}: random weights and tokens."""',
            "",
            "import torch",
            "",
            f"from planner.language.templates import {imports}",
            "from planner.capture.source.decoder import Decoder",
            "",
            f"SIZES = {_written(sizes)}",
            "",
            "",
            "def model():",
            "    return Decoder(SIZES)",
            "",
            "",
            "def batch(size):",
            "    ids = torch.randint(SIZES.vocab, (size, SIZES.seq_len + 1))",
            '    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}',
            "",
        ]
    )


def _has(sizes: Transformer, kind: type[Any]) -> bool:
    return any(isinstance(getattr(sizes, each.name), kind) for each in fields(sizes))


def _written(record: Any) -> str:
    """Return the call that makes a record, without what it has by default."""
    given = []
    for each in fields(record):
        value = getattr(record, each.name)
        if each.default is not MISSING and value == each.default:
            continue
        is_record = isinstance(value, Experts | Latent)
        given.append(f"{each.name}={_written(value) if is_record else repr(value)}")
    return f"{type(record).__name__}({', '.join(given)})"
