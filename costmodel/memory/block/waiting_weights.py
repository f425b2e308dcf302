"""Weight gradients that wait, inside a block's backward, for the next collective of it.

Between a product's backward and that collective its input and the gradient of its output stay in
memory, which the backward would free otherwise. Then the weight gradients are made one by one, last
first, and each gives back what nothing else needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from costmodel.memory.block.backward_facts import Product
from costmodel.memory.block.deferred_weights import DeferredWeight, weight_job
from costmodel.memory.block.gradients import Gradients
from planner.language.graph import Op


class Waiting:
    """Those of a walk that wait now. Mutable: a tally.

    Attributes:
        waits: the products, by what each waits for.
        products: all products of the program that ever wait, by op.
        params: weights and biases of those that wait now.
        rows_bytes: copies of their inputs in rows.
    """

    def __init__(self, waits: Mapping[str, tuple[str, ...]]) -> None:
        """`waits` are those of `BackwardFacts`."""
        self.waits = waits
        self.products = frozenset(name for names in waits.values() for name in names)
        self._forget()

    def _forget(self) -> None:
        self.params: set[str] = set()
        self.rows_bytes = 0
        self._late: list[DeferredWeight] = []
        self._outputs: list[str] = []
        self._needed: set[str] = set()
        self._kept: dict[str, int] = {}

    def add(self, op: Op, product: Product, late: DeferredWeight, trained: Iterable[str]) -> None:
        """Let the weight gradient of an op wait; `trained` are those of its weight and bias that
        get a gradient.
        """
        self._late.append(late)
        self._outputs.append(op.outputs[0])
        self._needed |= product.never_freed
        self.params.update(trained)
        self.rows_bytes += product.rows_bytes or 0

    def freed(self, storages: Iterable[tuple[str, int]]) -> int:
        """Return the bytes of those of the storages, that autograd lets go, which go now; others
        stay for what waits.
        """
        now = 0
        for root, size in storages:
            if root in self._needed:
                self._kept[root] = size
            else:
                now += size
        return now

    def make(
        self,
        grads: Gradients,
        *,
        first: bool,
        gradient_factor: int,
        waiting: Collection[str],
        made: dict[str, int],
    ) -> tuple[int, int]:
        """Return by how much memory rises while all that waits is made, and the bytes of gradients
        that this leaves; these are added to `made`, which has gradients so far. Other arguments
        are as in `backward_walk`.
        """
        # As in the walk: gradients that wait for the end of the program are not summed in fp32 yet.
        to_the_end = not self.params.isdisjoint(waiting)
        factor = 1 if to_the_end else gradient_factor
        together = Counter(grads.buffer_of(name)[0] for name in self._outputs)
        jobs = []
        for output, late in zip(self._outputs, self._late, strict=True):
            *given, gradient = late.held
            # A tensor that others need is not given back, nor one that outlives the block.
            back = [(n, size) for n, size in given if n in self._kept or n not in self._needed]
            buffer, _ = grads.buffer_of(output)
            if grads.num_users(output) == together[buffer]:
                back.append(gradient)
            jobs.append(late._replace(held=tuple(back), has_gradient=late.weight in made))
        stays = first or to_the_end
        rise, left = weight_job(jobs, first=stays, gradient_factor=factor)
        if stays:
            made.update({late.weight: factor * late.weight_bytes for late in self._late})
        return rise, left

    def release(self, grads: Gradients) -> int:
        """Forget all that waited, as it is made; return the bytes that were saved for it alone."""
        for name in self._outputs:
            grads.free(name)
        kept = sum(self._kept.values())
        self._forget()
        return kept
