"""Which modules define the ops of a graph that torch itself does not have.

A forward may import a library where it first uses it, and ops of the library are there from then
on, in that process. Ranks run programs and no forward: they import what the graph names.
"""

from __future__ import annotations

from torch._library.custom_ops import OPDEFS

from planner.language.graph import ModelGraph


def libraries_of(graph: ModelGraph) -> tuple[str, ...]:
    """Return the modules that define a graph's ops by `torch.library.custom_op`.

    Of ops that a library defines in other ways it is not told where they are.
    """
    targets = {op.target for program in (graph.preamble, *graph.classes) for op in program.ops}
    found = set()
    for target in targets:
        namespace, packet, *_ = target.split(".")
        defined = OPDEFS.get(f"{namespace}::{packet}")
        if defined is not None:
            found.add(defined._init_fn.__module__)
    return tuple(sorted(found))
