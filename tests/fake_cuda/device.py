"""CUDA without a GPU: import this before torch, in a process of its own.

Tensors of FakeTensorMode may then lie on "cuda:0". They have no values; but shapes, dtypes and
devices are checked op by op (an op on two devices raises), backwards run on autograd's thread for
the device, as on a GPU, and FSDP2 and optimizers take their ways for CUDA. Streams and events do
nothing; `waited` is told what the host waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.native import built

assert "torch" not in sys.modules, "import tests.fake_cuda.device before torch"
# torch looks for the hooks as it is loaded; the guard is registered after it.
_library = ctypes.CDLL(str(built(Path(__file__).with_name("guard.cpp"))), mode=ctypes.RTLD_GLOBAL)
import torch  # noqa: E402

_library.register_guard()

DEVICE = torch.device("cuda", 0)

waited: list[Callable[[str], None]] = []
"""Functions that are told of a wait for a stream, an event or the device, by its name."""


def _waits(what: str) -> None:
    for tell in waited:
        tell(what)


class Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waits("Event.synchronize")

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream:
    """A stream on which all has been done."""

    device = DEVICE
    device_type = 1
    stream_id = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waits("Stream.synchronize")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class CUDAGraph:
    """A graph of what has no values: there is nothing to do again."""

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


_DEFAULT = Stream()


@contextlib.contextmanager
def _on(_: Any) -> Iterator[None]:
    yield


def _default(_: Any = None) -> Stream:
    return _DEFAULT


_NO_STATE = torch.zeros(16, dtype=torch.uint8)

_REPLACED: dict[str, Any] = {
    "CUDAGraph": CUDAGraph,
    "graph_pool_handle": lambda: (0, 1),
    "Event": Event,
    "Stream": Stream,
    "stream": _on,
    "current_stream": _default,
    "default_stream": _default,
    "set_device": lambda _: None,
    "current_device": lambda: 0,
    "synchronize": lambda _=None: _waits("synchronize"),
    "device_count": lambda: 1,
    "get_rng_state": lambda _=None: _NO_STATE.clone(),
    "set_rng_state": lambda _state, _=None: None,
    "manual_seed": lambda _: None,
    "manual_seed_all": lambda _: None,
    "memory_stats_as_nested_dict": lambda _=None: {"allocated_bytes": {"all": {"current": 0}}},
    "max_memory_allocated": lambda _=None: 0,
    "_lazy_init": lambda: None,
}
for _name, _made in _REPLACED.items():
    setattr(torch.cuda, _name, _made)
torch.accelerator.current_stream = _default  # type: ignore[assignment]
