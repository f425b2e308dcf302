"""Which samples of a map-style dataset are in which global batch: the same for any plan's ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import Any, Literal

import torch

from planner.errors import ModelError
from planner.runtime.batches.draws import drawn_from, seed_of

AtEnd = Literal["wrap", "drop", "short"]
"""What becomes of the samples left at the end of a pass, fewer than a batch: the batch is filled
up from the front, they are left out, or the batch is smaller."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The global batches of each pass over a dataset, as numbers of samples.

    Attributes:
        num_samples: of the dataset.
        batch: samples of a whole batch.
        least: samples of the smallest batch that can be trained on.
        at_end: what becomes of the rest of a pass.
        shuffle: whether each pass has an order of its own.
        seed: what these orders, and random numbers of a sampler, are drawn from.
        sampler: gives the order of a pass instead, on all ranks the same.
        batches_of_sampler: whether that gives whole batches.
        together: how many samples belong together: batches have a multiple of them.
    """

    num_samples: int
    batch: int
    least: int
    at_end: AtEnd
    shuffle: bool = False
    seed: int = 0
    sampler: Iterable[Any] | None = None
    batches_of_sampler: bool = False
    together: int = 1

    def __post_init__(self) -> None:
        """Raise ModelError where a pass has no batch, or a last one that can't be trained on."""
        if self.sampler is not None:
            return
        rest = self.num_samples % self.batch
        if self.at_end == "short" and rest % self.together:
            raise self._not_together(rest)
        if self.at_end == "short" and 0 < rest < self.least:
            raise ModelError(
                f"at_end='short' leaves a last batch of {rest} of the {self.num_samples} samples, "
                f"and the plan takes {self.least} to {self.batch}; choose 'wrap' or 'drop'"
            )
        short_of = {"wrap": 1, "drop": self.batch, "short": self.least}[self.at_end]
        if self.num_samples < short_of:
            raise ModelError(
                f"the dataset has {self.num_samples} samples, which make no batch of "
                f"{self.batch} with at_end={self.at_end!r}; give more, or choose 'wrap'"
            )

    @property
    def samples_of_pass(self) -> int | None:
        """How many samples a pass has, not counting what fills up its last batch; None where the
        sampler does not say it, or gives whole batches.
        """
        if self.batches_of_sampler:
            return None
        count = self.num_samples if self.sampler is None else length_hint(self.sampler, -1)
        return None if count < 0 else count

    def batches(self, epoch: int, start: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the batches of a pass from its sample `start` on: place in the pass, and samples.

        Raises ModelError for a batch of the sampler that can't be trained on.
        """
        if self.batches_of_sampler:
            yield from self._given_batches(epoch, start)
            return
        order = self._order(epoch)
        count = len(order)
        while start < count:
            # Beyond the end of a pass the batch is filled up from its front.
            samples = [int(order[at % count]) for at in range(start, start + self.batch)]
            if start + self.batch > count and self.at_end != "wrap":
                samples = samples[: count - start]
                if self.at_end == "drop" or len(samples) < self.least:
                    return
                if len(samples) % self.together:
                    raise self._not_together(len(samples))
            yield start, samples
            start += self.batch

    def _order(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        if self.sampler is not None:
            _set_epoch(self.sampler, epoch)
            return list(drawn_from(self.sampler, self.seed, epoch))
        if not self.shuffle:
            return range(self.num_samples)
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def _given_batches(self, epoch: int, start: int) -> Iterator[tuple[int, list[int]]]:
        assert self.sampler is not None
        _set_epoch(self.sampler, epoch)
        place = 0
        for given in drawn_from(self.sampler, self.seed, epoch):
            samples = list(given)
            if not self.least <= len(samples) <= self.batch:
                raise ModelError(
                    f"the batch sampler gave {len(samples)} samples; it gives global batches, and "
                    f"the plan takes {self.least} to {self.batch}"
                )
            if len(samples) % self.together:
                raise ModelError(
                    f"the batch sampler gave {len(samples)} samples, and {self.together} belong "
                    f"together; give batches of a multiple of {self.together}"
                )
            if place >= start:
                yield place, samples
            place += len(samples)

    def _not_together(self, rest: int) -> ModelError:
        return ModelError(
            f"at_end='short' leaves a last batch of {rest} samples, and {self.together} belong "
            "together; choose 'wrap' or 'drop', or give a multiple of them"
        )

    def __len__(self) -> int:
        """Batches of one pass; TypeError where the batch sampler does not say it."""
        if self.batches_of_sampler:
            return len(self.sampler)  # type: ignore[arg-type]
        count = self.num_samples if self.sampler is None else len(self.sampler)  # type: ignore[arg-type]
        whole, rest = divmod(count, self.batch)
        goes_on = {"wrap": rest > 0, "drop": False, "short": rest >= self.least}
        return whole + goes_on[self.at_end]


def _set_epoch(sampler: Any, epoch: int) -> None:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
