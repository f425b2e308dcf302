"""What to tell of the parts of a model that run as they are: which, where, and what they cost."""

from __future__ import annotations

from planner.language.graph import ModelGraph, bind_arg
from planner.language.graph.module_keys import OPAQUE_MODULE, class_of

_FEW = 3
"""Blocks that a message names."""


def called_modules_messages(graph: ModelGraph) -> tuple[str, ...]:
    """Name each module that no graph can hold, in a line for each class and line of the user's."""
    found: dict[tuple[str, str], list[str]] = {}
    costs: dict[tuple[str, str], tuple[int, int]] = {}
    for index, program in enumerate(graph.classes):
        for op in program.ops:
            if op.target != OPAQUE_MODULE:
                continue
            key = class_of(str(op.args[0])), op.line
            blocks = [block.name for block in graph.blocks if block.class_index == index]
            found.setdefault(key, []).extend(blocks)
            flop, *_, kernels, _ = bind_arg(op.args[3], 1)[0]
            costs[key] = flop, kernels
    messages = []
    for (name, line), blocks in found.items():
        flop, kernels = costs[name, line]
        few = ", ".join(blocks[:_FEW])
        few += f" and {len(blocks) - _FEW} more" * (len(blocks) > _FEW)
        messages.append(
            f"{name} of {few}{f' at {line}' if line else ''} runs as it is, because its course "
            f"depends on values: every rank of tp and cp computes all of it, about {flop:,} flop "
            f"and {kernels} kernels forward for a sample, as counted on random values"
        )
    return tuple(messages)


def called_whole(graph: ModelGraph) -> str:
    """Return which part of a model runs as it is, so that no stage can end in it; or nothing."""
    for program in graph.classes:
        for op in program.ops:
            if op.target == OPAQUE_MODULE:
                at = f" at {op.line}" if op.line else ""
                return (
                    f" ({class_of(str(op.args[0]))}{at} depends on values, and so is called whole)"
                )
    return ""
