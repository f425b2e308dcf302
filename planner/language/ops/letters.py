"""Shardings of an op whose dims can be named by letters, as in an einsum.

``b s i, o i -> b s o`` says all there is to say about a linear layer on one mesh axis:
sharding a letter shards every tensor that has it. A tensor without the letter is whole on
every rank. An output without it is a sum over ranks if the op sums over that letter;
otherwise the letter can't be sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from planner.language.layout.placement import OpSharding, Shard
from planner.language.ops.call import Call, P, R, Shape

Letter = int | str
Letters = Sequence[Letter | None]
"""A letter for each dim of a tensor; None for a dim that can't be sharded."""


def by_letters(
    inputs: Sequence[Letters],
    outputs: Sequence[Letters],
    *,
    summed: Collection[Letter] = (),
    addends: Collection[int] = (),
) -> Iterator[OpSharding]:
    """Yield the sharding of each letter in turn.

    `summed` are the letters the op sums over. `addends` are positions of inputs added
    after that sum (a bias): they become Partial with the output, so that the sum over
    ranks adds them once.
    """
    summed = set(summed)
    tensors = [list(tensor) for tensor in (*inputs, *outputs)]
    letters = dict.fromkeys(letter for tensor in tensors for letter in tensor if letter is not None)
    for letter in letters:
        counts = [tensor.count(letter) for tensor in tensors]
        if max(counts) > 1:
            continue  # a diagonal
        # A letter that an output lacks and that is not summed over: ranks would make different
        # outputs.
        is_summed = letter in summed
        if not is_summed and not all(counts[len(inputs) :]):
            continue
        places = [
            Shard(tensor.index(letter)) if count else None
            for tensor, count in zip(tensors, counts, strict=True)
        ]
        # A tensor without the letter is whole; an addend counts once in the sum over ranks, as a
        # term; an output without the letter is a term.
        yield OpSharding(
            inputs=tuple(
                place or (P if is_summed and i in addends else R)
                for i, place in enumerate(places[: len(inputs)])
            ),
            outputs=tuple(place or P for place in places[len(inputs) :]),
        )


def broadcast(shape: Shape, out_shape: Shape) -> list[int | None]:
    """Letter a tensor's dims by the output dim each is aligned with under broadcasting.

    A dim of size one that is stretched gets None: it is whole on every rank.
    """
    offset = len(out_shape) - len(shape)
    return [i + offset if size == out_shape[i + offset] else None for i, size in enumerate(shape)]


def pointwise(call: Call, *, out: int = 0) -> Iterator[OpSharding]:
    """Yield the shardings of an op that works element by element with broadcasting."""
    out_shape = call.outputs[out]
    inputs = [broadcast(shape, out_shape) for shape in call.inputs]
    yield from by_letters(inputs, [range(len(shape)) for shape in call.outputs])


def same_dims(call: Call, *, fixed: Collection[int] = ()) -> Iterator[OpSharding]:
    """Yield shardings of an op that keeps each dim of its one input but mixes `fixed` ones."""
    letters = [None if d in fixed else d for d in range(len(call.inputs[0]))]
    yield from by_letters([letters], [letters] * len(call.outputs))
