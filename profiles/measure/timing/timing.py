"""Timing of ops and blocks inside one rank.

An op is timed as training runs it: several forwards whose results stay alive, then their
backwards in one sweep of the autograd engine, on inputs that rotate through more memory
than the caches hold. All ranks of a node begin together and keep on for the same time, so
they contend for memory and cores as they will in training. One call is one *visit*: a probe
is visited several times in the course of a measurement, so that a machine's slow drifts
fall on all probes alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from profiles.measure.timing.calls import MAX_CALLS, Arena, Calls, Functions
from profiles.measure.timing.clock import Clock, Pace

SAMPLE_S = 1e-3
"""A sample is long enough that reading the clock and the loop do not show."""

LONG_CALL_S = 2 * SAMPLE_S

LEAST_SAMPLES = 2
MOST_SAMPLES = 200
WARM_SAMPLES = 2


class OpTimer:
    """Times ops and blocks on one device. Mutable: it keeps their inputs and compiled forms."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pace = Pace(clock)
        self._arena = Arena(clock.device)
        self._functions = Functions(clock.device)

    def visit(
        self,
        probe: Mapping[str, Any],
        *,
        seconds: float,
        warm: bool = True,
        begin_together: Callable[[], Any] = lambda: None,
    ) -> dict[str, list[float]]:
        """Return samples of seconds per call: ``forward`` and ``backward`` (maybe empty) on
        inputs that rotate through memory; if `warm`, ``forward_warm`` and ``backward_warm``
        on the same inputs; and of the fixed works before and after them, by `PaceKind`.
        """
        calls = Calls.of(probe, self._arena, self._functions)
        samples = _visit(calls, self._clock, self._pace, seconds, begin_together)
        if warm:
            samples |= _visit_warm(calls, self._clock)
        if "op" in probe and _writes_inputs(probe["op"]):
            self._arena.forget()
        return samples


def _visit(
    calls: Calls, clock: Clock, pace: Pace, seconds: float, begin_together: Callable[[], Any]
) -> dict[str, list[float]]:
    per_sample = _calls_per_sample(calls, clock)
    cold = _sampler(calls, per_sample, clock)
    begin_together()
    if per_sample > 1:  # the ranks leave the barrier one by one, which shows in short samples
        _sample(cold, clock, per_sample, [], [])
    samples: dict[str, list[float]] = {"forward": [], "backward": []}
    samples.update(pace.take().items())
    deadline = time.perf_counter() + seconds
    while len(samples["forward"]) < MOST_SAMPLES:
        if time.perf_counter() > deadline and len(samples["forward"]) >= LEAST_SAMPLES:
            break
        _sample(cold, clock, per_sample, samples["forward"], samples["backward"])
    for kind, paces in pace.take().items():
        samples[kind] += paces
    return samples


def _visit_warm(calls: Calls, clock: Clock) -> dict[str, list[float]]:
    calls.stay_warm()
    per_sample = _calls_per_sample(calls, clock)
    warm = _sampler(calls, per_sample, clock)
    _sample(warm, clock, per_sample, [], [])
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(WARM_SAMPLES):
        _sample(warm, clock, per_sample, forward, backward)
    return {"forward_warm": forward, "backward_warm": backward}


def _calls_per_sample(calls: Calls, clock: Clock) -> int:
    once = 0.0
    for _ in range(2):  # a first call is slow, which matters to short ones alone
        once, outputs = clock.time(lambda: calls.forward(1))
        calls.backward(outputs)
        if once > LONG_CALL_S:
            break
    return max(1, min(MAX_CALLS, round(SAMPLE_S / max(once, 1e-7))))


Sampler = tuple[Callable[[], Any], Callable[[Any], Any] | None, float]
"""What runs the forwards of one sample, what runs their backwards given the results, and the
seconds that the host needs ahead of the device to issue either."""


def _sampler(calls: Calls, count: int, clock: Clock) -> Sampler:
    if calls.device.type == "cuda":
        captured = _captured(calls, count)
        if captured is not None:
            return captured
    forward = partial(calls.forward, count)
    backward = calls.backward if calls.differentiable else None
    return forward, backward, _issue_seconds(calls, count, clock)


def _issue_seconds(calls: Calls, count: int, clock: Clock) -> float:
    """Return the host's seconds for the forwards or the backwards of a sample, whichever takes
    longer; 0 on a CPU.
    """
    if calls.device.type != "cuda":
        return 0.0
    made: list[Any] = []
    issue_s = clock.issue_seconds(lambda: made.extend(calls.forward(count)))
    return max(issue_s, clock.issue_seconds(lambda: calls.backward(made)))


def _captured(calls: Calls, count: int) -> Sampler | None:
    """Return the sample as CUDA graphs, so that the host's issuing does not count.

    Both are captured on the one stream that `torch.cuda.graph` captures on, because autograd
    runs a backward on the stream of its forward. None for an op that can't be captured, such
    as one that reads a result on the host.
    """
    torch.cuda.synchronize()
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    try:
        # The backward replays from the forward's pool, where its saved tensors lie.
        with torch.cuda.graph(forward):
            outputs = calls.forward(count)
        if not calls.differentiable:
            return forward.replay, None, 0.0
        with torch.cuda.graph(backward, pool=forward.pool()):
            calls.backward(outputs, keep=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return forward.replay, lambda _: backward.replay(), 0.0


def _sample(
    sampler: Sampler, clock: Clock, count: int, forward: list[float], backward: list[float]
) -> None:
    run_forward, run_backward, head_start_s = sampler
    spent, outputs = clock.time_compute(run_forward, head_start_s=head_start_s)
    forward.append(spent / count)
    if run_backward is not None:
        spent, _ = clock.time_compute(partial(run_backward, outputs), head_start_s=head_start_s)
        backward.append(spent / count)


def _writes_inputs(op: Mapping[str, Any]) -> bool:
    """Whether an op changes its inputs, as those do whose name ends in an underscore."""
    return str(op["target"]).split(".")[1].endswith("_")
