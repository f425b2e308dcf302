"""Where the decoder of an encoder-decoder model begins, by what blocks read of each other.

        block        0      1      2  |  3      4      5      6
        makes       x0 --> x1 --> e --|------------.------.
        reads                         |  y0 --> y1(e) --> y2(e) --> loss

A chain hands each value on to the next block. At the border of encoder and decoder alone it begins
anew, from tokens (or queries) of the decoder's own.
"""

from __future__ import annotations

from planner.language.graph.model_graph import ModelGraph


def first_decoder_block(graph: ModelGraph) -> int | None:
    """Return the number of the first block of a decoder; None where there is none.

    It is the first cut of the chain that only values of the block before it cross, and behind which
    the chain begins anew: the next block reads none of them, or it reads them beside what no other
    block's values went into (tokens or queries of the decoder's own), and others behind read them,
    too. (A residual that several blocks read comes without such a beginning.) An encoder has two
    blocks at least: what the first one makes (embedded tokens) is often read by all layers of a
    chain. What the last block alone reads (terms of a loss, another tower's features) is left out.
    """
    readers: dict[str, list[int]] = {}
    for block in graph.blocks:
        for name in dict.fromkeys(block.inputs):
            readers.setdefault(name, []).append(block.index)
    made_by, last = graph.producer, graph.blocks[-1].index
    for at in range(2, len(graph.blocks)):
        behind = {
            name: [index for index in readers.get(name, ()) if index >= at]
            for name, made in made_by.items()
            if made < at
        }
        crossing = {name: read for name, read in behind.items() if read and read != [last]}
        if any(made_by[name] != at - 1 for name in crossing):
            continue
        beginnings = {name for name in crossing if _is_beginning(graph, name)}
        begins_anew = any(
            name in beginnings or (name not in made_by and readers[name][0] == at)
            for name in graph.blocks[at].inputs
        )
        made = [read for name, read in crossing.items() if name not in beginnings]
        if made and all(read[0] > at or (begins_anew and len(read) > 1) for read in made):
            return at
    return None


def _is_beginning(graph: ModelGraph, name: str) -> bool:
    """Whether nothing that other blocks made went into a value of a block."""
    block = graph.blocks[graph.producer[name]]
    program = graph.classes[block.class_index]
    needed = program.only((program.outputs[block.outputs.index(name)],)).inputs
    taken = dict(zip(program.inputs, block.inputs, strict=True))
    return not any(taken[own] in graph.producer for own in needed)
