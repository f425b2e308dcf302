"""Where the decoder of an encoder-decoder model begins, by the names of its modules."""

from __future__ import annotations

from planner.graph.model_graph import ModelGraph


def first_decoder_block(graph: ModelGraph) -> int | None:
    """Return the number of the first block inside a module called ``decoder`` that blocks of an
    ``encoder`` stand before; None where there is none.
    """
    parts = [block.name.split(".") for block in graph.blocks]
    decoder = next((at for at, names in enumerate(parts) if "decoder" in names), None)
    if decoder is None or not any("encoder" in names for names in parts[:decoder]):
        return None
    return decoder
