"""Timing of ops and collectives inside one rank.

An op is timed as training runs it: several forwards whose results stay alive, then their
backwards in one sweep of the autograd engine, on inputs that rotate through more memory
than the caches hold. All ranks of a node begin together and keep on for the same time, so
they contend for memory and cores as they will in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.graph import Ref, Symbol, from_json
from planner.program_fx import aten_overload, to_graph_module

ROTATION_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Inputs rotate through this much memory, so that weights are as cold as in training: more
than a core's share of the caches, and more than the L2 of a GPU."""

SAMPLE_S = 2e-3
"""A sample is long enough that reading the clock and the loop do not show."""

MAX_CALLS_PER_SAMPLE = 32
LEAST_SAMPLES = 5
MOST_SAMPLES = 200
WARM_SAMPLES = 3


OWN_CORE_SHARE = 0.95
"""Work that had its core for less than this share of the time was disturbed by others."""


class Clock:
    """Seconds of a piece of work on a device: by events on a GPU, else by the wall.

    `own_core` says that every rank has a core to itself.
    """

    def __init__(self, device: torch.device, *, own_core: bool = False) -> None:
        self.device = device
        self._own_core = own_core and device.type == "cpu"

    def time(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return (seconds, result of work). On a GPU, the time between two events."""
        if self.device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            result = work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3, result
        began = time.perf_counter()
        result = work()
        return time.perf_counter() - began, result

    def time_compute(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the same of work that waits for nobody and runs in this thread alone.

        If other processes took the core meanwhile, it is the time on the core: what the work
        takes on a machine that only trains.
        """
        if not self._own_core:
            return self.time(work)
        began = time.thread_time()
        seconds, result = self.time(work)
        on_core = time.thread_time() - began
        return (on_core if on_core < OWN_CORE_SHARE * seconds else seconds), result


def time_op(
    probe: Mapping[str, Any],
    *,
    clock: Clock,
    seconds: float,
    begin_together: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Return samples of seconds per call: ``forward`` and ``backward`` (maybe empty) on
    inputs that rotate through memory, ``forward_warm`` and ``backward_warm`` on the same.
    """
    calls = _Calls.of(probe, clock.device)
    _, outputs = clock.time(lambda: calls.forward(1))
    calls.backward(outputs)
    once, outputs = clock.time(lambda: calls.forward(1))
    calls.backward(outputs)
    per_sample = max(1, min(MAX_CALLS_PER_SAMPLE, round(SAMPLE_S / max(once, 1e-7))))
    samples: dict[str, list[float]] = {
        name: [] for name in ("forward", "backward", "forward_warm", "backward_warm")
    }
    cold = _sampler(calls, per_sample)
    begin_together()
    deadline = time.perf_counter() + seconds
    while len(samples["forward"]) < MOST_SAMPLES:
        if time.perf_counter() > deadline and len(samples["forward"]) >= LEAST_SAMPLES:
            break
        _sample(cold, clock, per_sample, samples["forward"], samples["backward"])
    calls.stay_warm()
    warm = _sampler(calls, per_sample)
    for _ in range(WARM_SAMPLES):
        _sample(warm, clock, per_sample, samples["forward_warm"], samples["backward_warm"])
    return samples


Sampler = tuple[Callable[[], Any], Callable[[Any], Any] | None]
"""What runs the forwards of one sample, and what runs their backwards given the results."""


def _sampler(calls: _Calls, count: int) -> Sampler:
    if calls.device.type == "cuda":
        captured = _captured(calls, count)
        if captured is not None:
            return captured
    return partial(calls.forward, count), calls.backward if calls.differentiable else None


def _captured(calls: _Calls, count: int) -> Sampler | None:
    """Return the sample as CUDA graphs, so that the host's issuing does not count.

    None for an op that can't be captured, such as one that reads a result on the host.
    """
    torch.cuda.synchronize()
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(forward):
            outputs = calls.forward(count)
        if not calls.differentiable:
            return forward.replay, None
        with torch.cuda.graph(backward, pool=forward.pool()):
            calls.backward(outputs, keep=True)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return forward.replay, lambda _: backward.replay()


def _sample(
    sampler: Sampler, clock: Clock, count: int, forward: list[float], backward: list[float]
) -> None:
    run_forward, run_backward = sampler
    spent, outputs = clock.time_compute(run_forward)
    forward.append(spent / count)
    if run_backward is not None:
        spent, _ = clock.time_compute(partial(run_backward, outputs))
        backward.append(spent / count)


Call = tuple[list[Any], dict[str, Any], list[Tensor]]
"""Arguments, keyword arguments, and the leaves among them that need gradients."""


class _Calls:
    """Ready-made calls of one op or block: on storage that rotates, or always on the same.

    Each call of a sample has its own leaves, so that gradients of shared weights are not
    summed, which the op alone would not do. Mutable: it remembers where the rotation is.
    """

    def __init__(
        self, function: Any, *, cold: list[Call], warm: list[Call], device: torch.device
    ) -> None:
        self.device = device
        self.differentiable = bool(cold[0][2])
        self._function = function
        self._calls, self._warm = cold, warm
        self._next = 0
        self._leaves: list[Tensor] = []
        self._gradients: list[Tensor] = []

    @classmethod
    def of(cls, probe: Mapping[str, Any], device: torch.device) -> _Calls:
        """Return the calls of an op, or of a whole program (``probe["program"]``)."""
        forms = probe["tensors"]
        function: Callable[..., Any]
        kwargs: tuple[tuple[str, Any], ...] = ()
        if "program" in probe:
            program = from_json(probe["program"])
            function, name = to_graph_module(program, {}, device), program.name
            args = tuple(Ref(f"t{position}") for position in range(len(forms)))
        else:
            op = from_json(probe["op"])
            function, name = aten_overload(op.target), op.target
            args, kwargs = op.args, op.kwargs

        def call_on(tensors: list[Tensor]) -> Call:
            own = [tensor.detach() for tensor in tensors]
            needing = zip(own, forms, strict=True)
            leaves = [t.requires_grad_() for t, form in needing if form["requires_grad"]]
            named = {f"t{position}": tensor for position, tensor in enumerate(own)}
            plain = [_plain(arg, named, device) for arg in args]
            return plain, {k: _plain(v, named, device) for k, v in kwargs}, leaves

        num_bytes = sum(_empty(form, "meta").nbytes for form in forms)
        rotation = ROTATION_BYTES[device.type] // max(num_bytes, 1)
        stores = max(1, min(MAX_CALLS_PER_SAMPLE, rotation))
        first = [_make(form, name, forms, device) for form in forms]
        # Values do not matter, so the other sets are copies: they are quicker to make.
        sets = [first, *([tensor.clone() for tensor in first] for _ in range(stores - 1))]
        return cls(
            function,
            cold=[call_on(sets[i % stores]) for i in range(MAX_CALLS_PER_SAMPLE)],
            warm=[call_on(first) for _ in range(MAX_CALLS_PER_SAMPLE)],
            device=device,
        )

    def stay_warm(self) -> None:
        """From now on call on the same storage every time."""
        self._calls = self._warm

    def forward(self, count: int) -> list[Any]:
        """Run the op `count` times and return the results, all alive."""
        function = self._function
        chosen = [self._calls[(self._next + i) % len(self._calls)] for i in range(count)]
        self._next += count
        self._leaves = [leaf for _, _, leaves in chosen for leaf in leaves]
        return [function(*args, **kwargs) for args, kwargs, _ in chosen]

    def backward(self, results: list[Any], *, keep: bool = False) -> None:
        """Run the backward of the results of the latest `forward`, in one sweep.

        `keep` leaves the autograd graph alive for another backward.
        """
        if not self.differentiable:
            return
        outputs = [_differentiable(result) for result in results]
        if not self._gradients:
            self._gradients = [torch.ones_like(part) for part in outputs[0]]
        torch.autograd.grad(
            [part for parts in outputs for part in parts],
            self._leaves,
            self._gradients * len(outputs),
            allow_unused=True,
            retain_graph=keep,
        )


def _differentiable(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in parts if isinstance(part, Tensor) and part.requires_grad]


def _plain(arg: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if isinstance(arg, Ref):
        return tensors[arg.name]
    if isinstance(arg, tuple):
        return [_plain(item, tensors, device) for item in arg]
    if isinstance(arg, Symbol):
        return device if arg.kind == "device" else getattr(torch, arg.value)
    return arg


def _empty(form: Mapping[str, Any], device: str) -> Tensor:
    return torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=device)


def _make(
    form: Mapping[str, Any], target: str, forms: list[Mapping[str, Any]], device: torch.device
) -> Tensor:
    """Make up a tensor: normal numbers; valid indices where it can only be an index."""
    dtype = getattr(torch, form["dtype"])
    if dtype.is_floating_point:
        return torch.randn(form["shape"], device=device).to(dtype)
    if dtype == torch.bool:
        return torch.ones(form["shape"], dtype=dtype, device=device)
    floating = [f["shape"] for f in forms if "float" in f["dtype"] and f["shape"]]
    if not floating:
        return torch.ones(form["shape"], dtype=dtype, device=device)
    # An embedding's indices reach its whole table; elsewhere only the least size is safe.
    bound = floating[0][0] if ".embedding." in target else min(floating[0])
    return torch.randint(bound, form["shape"], dtype=dtype, device=device)


def time_collective(
    kind: str, num_bytes: int, group: dist.ProcessGroup, *, clock: Clock, seconds: float
) -> dict[str, list[float]]:
    """Return samples of seconds per collective; every rank of the group must call."""
    work = _collective(kind, num_bytes, group, clock.device)
    work()
    spent, _ = clock.time(work)
    spent = min(spent, clock.time(work)[0])
    # The first rank of the group decides for all how often to repeat.
    plan = torch.tensor(
        [
            max(1, min(100, round(SAMPLE_S / max(spent, 1e-7)))),
            max(LEAST_SAMPLES, min(MOST_SAMPLES, int(seconds / max(spent, SAMPLE_S)))),
        ],
        device=clock.device,
    )
    dist.broadcast(plan, dist.get_global_rank(group, 0), group=group)
    per_sample, count = (int(n) for n in plan)
    samples = []
    for _ in range(count):
        spent, _ = clock.time(lambda: [work() for _ in range(per_sample)])
        samples.append(spent / per_sample)
    return {"seconds": samples}


def _collective(
    kind: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Any]:
    """Return a function that runs one collective, as the runtime issues it.

    `num_bytes` is the full tensor's size; results are fresh tensors where the runtime's
    functional collectives make them.
    """
    parts, name = group.size(), group.group_name
    whole = torch.ones(max(1, num_bytes // 4 // parts) * parts, device=device)
    piece = whole[: whole.numel() // parts].clone()
    functional = torch.ops._c10d_functional
    wait = functional.wait_tensor
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: wait(functional.all_gather_into_tensor(piece, parts, name))
        case "reduce_scatter":
            return lambda: wait(functional.reduce_scatter_tensor(whole, "sum", parts, name))
        case "all_to_all":
            sizes = [whole.numel() // parts] * parts
            return lambda: wait(functional.all_to_all_single(whole, sizes, sizes, name))
        case "broadcast":
            return _Broadcast(whole, group)
        case "send_recv":
            return _PingPong(whole, group)
    raise ValueError(f"collective {kind!r} is unknown")


class _Broadcast:
    """Broadcasts from each rank in turn, so that none can run ahead of the others."""

    def __init__(self, whole: Tensor, group: dist.ProcessGroup) -> None:
        self._whole, self._group, self._root = whole, group, 0

    def __call__(self) -> None:
        source = dist.get_global_rank(self._group, self._root)
        dist.broadcast(self._whole, source, group=self._group)
        self._root = (self._root + 1) % self._group.size()


class _PingPong:
    """One message from the first rank to the second, answered by the next call.

    Ranks beyond the second do nothing.
    """

    def __init__(self, whole: Tensor, group: dist.ProcessGroup) -> None:
        self._whole, self._group, self._turn = whole, group, 0
        self._rank = group.rank()

    def __call__(self) -> None:
        sender = self._turn % 2
        self._turn += 1
        if self._rank > 1:
            return
        peer = dist.get_global_rank(self._group, 1 - self._rank)
        if self._rank == sender:
            dist.send(self._whole, peer, group=self._group)
        else:
            dist.recv(self._whole, peer, group=self._group)
