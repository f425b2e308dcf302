"""How much of a part of a batch its mean loss is the mean of; free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.errors import ModelError


def count_tokens(
    path: str, *, ignore_index: int = -100, skip_first: bool = False
) -> Callable[[Any], int]:
    """Return a function that counts the labels of a batch that are not to be ignored.

    For `planner.apply(..., loss_weight=)`, where the graph does not say so itself (a cross-entropy
    with `ignore_index` does): the loss is then the mean over all tokens that
    count, wherever they lie, as one device computes it. `path` names the labels in the
    batch: a dict's key, or the position in a tuple ("1"). With `skip_first` the first label
    of each sequence does not count, for models that shift labels themselves (as those of
    Hugging Face for causal language modelling do).
    """

    def count(batch: Any) -> int:
        # `planner --help` imports this package and no graph.
        from planner.language.graph.batch import flatten_batch

        leaves, _ = flatten_batch(batch)
        if path not in leaves:
            raise ModelError(
                f"count_tokens({path!r}) finds no such tensor in the batch, which has "
                f"{', '.join(leaves)}"
            )
        labels = leaves[path]
        if skip_first:
            labels = labels[..., 1:]
        return int((labels != ignore_index).sum())

    return count
