"""The usual layouts of a template's blocks on tp, as Megatron-LM has them.

A template's tapes note how each tensor lies on tp (`tape`), so nothing is searched.
"""

from __future__ import annotations

from functools import lru_cache

from planner.layout.class_layout import ClassLayout
from planner.templates.build import template_of
from planner.templates.tape import STREAM
from planner.templates.transformer import Transformer


@lru_cache(maxsize=1024)
def tp_layouts(model: Transformer, *, sequence_parallel: bool) -> tuple[ClassLayout, ...]:
    """Return the layouts of a model's classes on tp.

    With `sequence_parallel` what goes from layer to layer is split by positions, so that sums over
    tp become a reduce-scatter before it and an all-gather after it.
    """
    stream = "S(1)" if sequence_parallel else "R"

    def placed(text: str) -> str:
        return text.replace(STREAM, stream)

    return tuple(
        ClassLayout(
            class_index=index,
            axis="tp",
            inputs=tuple(map(placed, of.places[0])),
            params=tuple(map(placed, of.places[1])),
            outputs=tuple(map(placed, of.places[2])),
            ops=tuple((name, placed(text)) for name, text in of.shardings),
        )
        for index, of in enumerate(template_of(model).classes)
    )
