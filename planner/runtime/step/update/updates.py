"""From gradients of batches to changed weights: what a step does behind its job table.

    finish_gradients    sums over ranks, divisions, the norm, and the clip
    change_weights      a look for NaN and infinity, then the optimizer's step, on all ranks alike
    step_schedulers     the rate of the next step

The engine calls them in this order; where a loop updates apart, its own calls lie between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from planner.language.schedule.step_jobs import StepJobKind
from planner.runtime.batches.inputs.feed import Feed
from planner.runtime.process.spans import Spans
from planner.runtime.state.gradients.loss_scale import LossScaler
from planner.runtime.state.gradients.reached import Reached
from planner.runtime.state.rank_state import RankState
from planner.runtime.step.batch_norm import DeferredStatistics
from planner.runtime.step.executor import Executor
from planner.runtime.step.update.accumulation import Accumulation
from planner.runtime.step.update.values import Look, ValueCheck
from planner.timeline import CHECK


class Updates:
    """The updates of this rank's weights. Mutable.

    Attributes:
        grad_norm: of the last update's gradients before clipping; None where they are not clipped.
        scaler: what scales the loss; None but for precision "fp16".
        is_skipped: whether the last update was passed over, as gradients of the scaled loss were
            not finite.
    """

    def __init__(
        self,
        state: RankState,
        executor: Executor,
        accumulation: Accumulation,
        spans: Spans,
        *,
        reached: Reached,
        statistics: DeferredStatistics | None,
        scaler: LossScaler | None,
        schedulers: Sequence[Any],
        max_grad_norm: float | None,
        check_values: bool,
        hold: Callable[[], None],
    ) -> None:
        """`reached` tells parameters that no backward reached. With `check_values` a loss or a
        gradient that is not finite is an error. `hold` returns when weights may change: a save
        under way copies them.
        """
        self.grad_norm: Tensor | None = None
        self.scaler, self.is_skipped = scaler, False
        self._state, self._executor, self._accumulation = state, executor, accumulation
        self._spans, self._reached, self._statistics = spans, reached, statistics
        self._schedulers, self._max_grad_norm, self._hold = schedulers, max_grad_norm, hold
        self._checks_values = check_values
        looks = check_values or scaler is not None
        self._values = ValueCheck(state.mesh, executor) if looks else None

    def begin(self, *, is_apart: bool) -> None:
        """Clear gradients: the first batch of an update comes, which may be made apart."""
        if is_apart:
            self.grad_norm = None  # of an update before, where this is not clipped
        self._state.trained.zero_gradients()
        self._reached.begin()
        if self._statistics is not None:
            self._statistics.begin()

    def scaled(self, feed: Feed) -> Feed:
        """Return the feed whose backwards begin with the loss's scale."""
        if self.scaler is None:
            return feed
        scale = self.scaler.scale
        return replace(feed, loss_weights=[weight * scale for weight in feed.loss_weights])

    def check_loss(self, feed: Feed, loss: Tensor, shared: dist.Work | None) -> None:
        """Raise ValuesError where the loss of a batch without update is not finite, once `shared`,
        its sum over ranks, has ended.
        """
        # (What a scaled loss's gradients are is seen at the update.)
        if self._values is not None and self.scaler is None:
            look = self._look(self._values, loss, shared, has_gradients=False)
            self._is_passed_over(look, feed, loss)

    def finish_gradients(self, *, factor: float = 1.0, clips: bool) -> None:
        """Sum gradients over ranks, multiply them by `factor`, and clip them as the engine was told
        to, if this `clips`.
        """
        with self._executor.phase("sums of gradients"), self._spans.span("REDUCE"):
            if self._statistics is not None:
                self._statistics.finish()
            self._state.trained.finish_sums()
            # Sums over ranks come first, then the division by the batches' weights and the loss's
            # scale, then the norm: clipping limits the gradient of the whole update.
            if self.scaler is not None:
                factor /= self.scaler.scale
            self._accumulation.finish(self._state.trained.with_gradients(), factor=factor)
            if clips and self._max_grad_norm is not None:
                self.clip(self._max_grad_norm)

    def clip(self, max_norm: float) -> Tensor:
        """Scale finished gradients to a norm of at most `max_norm`; return the norm before."""
        self.grad_norm = self._state.trained.clip(max_norm)
        return self.grad_norm

    def change_weights(self, feed: Feed, loss: Tensor, shared: dist.Work | None) -> None:
        """Make the update of finished gradients; raise ValuesError where they, or the loss of the
        last batch `feed`, are not finite.
        """
        # Weights change only where nothing is wrong: the failing step can then run again from the
        # same weights, watched op by op.
        look, self.is_skipped = None, False
        passes_over = self._state.trained.can_pass_over(self._state.optimizer)
        if self._values is not None:
            with self._executor.phase("its look for NaN"), self._spans.span(CHECK):
                look = self._look(self._values, loss, shared, has_gradients=True)
                if not passes_over:
                    self.is_skipped = self._is_passed_over(look, feed, loss)
        if not self.is_skipped:
            self._step_optimizer(look if passes_over else None)
        if look is not None and passes_over:
            with self._executor.phase("its look for NaN"):
                self.is_skipped = self._is_passed_over(look, feed, loss)
        if self.scaler is not None:
            self.scaler.follow(is_skipped=self.is_skipped)
        self._state.steps += 1

    def step_schedulers(self) -> None:
        """Set the rate of the next step; not behind an update that was passed over."""
        if self._schedulers and not self.is_skipped:
            with self._spans.span(StepJobKind.LEARNING_RATE, on_host=True, is_job=True):
                for scheduler in self._schedulers:
                    scheduler.step()

    def _step_optimizer(self, look: Look | None) -> None:
        """Step, but where a look's flag says that something is wrong."""
        stepping = self._spans.span(StepJobKind.OPTIMIZER, is_job=True)
        with self._executor.phase("its optimizer's step"), stepping:
            self._hold()
            self._state.trained.step(
                self._state.optimizer,
                unreached=self._reached.missing(),
                is_wrong=None if look is None else look.flag,
            )

    def _look(
        self, values: ValueCheck, loss: Tensor, shared: dist.Work | None, *, has_gradients: bool
    ) -> Look:
        if shared is not None:
            shared.wait()
        gradients = self._state.trained.gradients() if has_gradients else ()
        norm = self.grad_norm if has_gradients else None
        # (A training that has its losses unchecked is steered by gradients alone.)
        return values.look(loss if self._checks_values else None, gradients, norm)

    def _is_passed_over(self, look: Look, feed: Feed, loss: Tensor) -> bool:
        """Whether a smaller scale of the loss may mend gradients that are not finite.

        Raises ValuesError where nothing does: of a loss that is not finite beside gradients that
        are, or without a scale that may fall.
        """
        if not look.is_wrong():
            return False
        if self.scaler is not None:
            is_of_scale = self.scaler.may_fall and not look.has_finite_gradients()
            if is_of_scale or not self._checks_values:
                return True
        values = self._values
        assert values is not None, "looks are the check's"
        # The step runs again alone, from cleared gradients, to find the op at fault.
        self._accumulation.forget()
        held = self._state.trained.stepped_by_name()
        named = {f"parameter {name}": copies[0].detach() for name, copies in held.items()}

        def again() -> None:
            self._state.trained.zero_gradients()
            with self._state.drawn():
                self._executor.train(self.scaled(feed))
            self._state.trained.finish_sums()

        raise values.explain(again, step=self._state.steps + 1, loss=loss, named=named)
