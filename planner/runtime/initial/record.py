"""Running a function that builds a model, without values, and noting what makes them.

    build()                          noted
    w = torch.empty(4096, 4096)      (nothing: a storage of 64 MiB)
    w.uniform_(-a, a)                uniform_(storage 0, -a, a), drawing from the start
    w.data.normal_(0, 0.02)          normal_(storage 0, 0, 0.02), drawing after the uniform_

Tensors are on the meta device and pretend to be on the CPU: PyTorch's and Hugging Face's
initialisers do nothing on meta. An op is noted with the storages it reads and writes, so views,
`.data` and ties need no care. No number is drawn. Each random op leaves a state of its own in
the generator, a mark: the state that the next random op finds says after which draw it comes, also
where the function seeds, forks or restores the generator in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from planner.capture.diagnose import calling_line
from planner.runtime.initial.recording import (
    START,
    Note,
    NotReplayableError,
    Recording,
    Ref,
    digest_of,
)
from planner.runtime.initial.replay import Replay

_CPU, _META = torch.device("cpu"), torch.device("meta")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__
_FIRST_MARK = 0x5EED << 40
"""Seeds of marks begin here, where no script's own seeds are likely to be."""

_FILLS = frozenset(
    ["uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"]
)
_DRAWS = _FILLS.union(
    ["bernoulli_", "rand", "randn", "randint", "randperm", "normal"],
    ["rand_like", "randn_like", "randint_like"],
)
"""Random ops whose number of draws does not depend on the values of a tensor."""
_OVERWRITES = _FILLS.union(["bernoulli_", "fill_", "zero_", "copy_"])
"""In-place ops that do not read what they write to."""
_ALLOCATES = frozenset(["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"])
_NOT_KEPT = ("device", "pin_memory", "generator")
_BY_VALUE = ("_no_grad_trunc_normal_",)
"""Functions of `torch.nn.init` that draw again until all values are right: noted as one op."""


def record(build: Callable[[], Any]) -> Recording:
    """Run `build` without values. Raises NotReplayableError; also what `build` raises itself."""
    recording = Recording()
    mode = _Recorder(recording)
    try:
        with mode.running():
            recording.module = build()
        recording.last = mode.place(torch.default_generator)
        recording.others = [(g, mode.place(g)) for g, _ in mode.drawn_from[1:]]
    finally:
        for generator, state in mode.drawn_from:
            generator.set_state(state)
    return recording


class _PretendsCpu(TorchFunctionMode):
    """Says of tensors on meta that they are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _IS_META:
            return False
        made = func(*args, **(kwargs or {}))
        return _CPU if func == _DEVICE and made == _META else made


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._to = recording
        self._marks: dict[str, int] = {}
        self._has_moved = False
        # Generators with their states before the first mark.
        self.drawn_from: list[tuple[torch.Generator, Tensor]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        self._mark(torch.default_generator, START)
        kept = {n: getattr(nn.init, n) for n in _BY_VALUE if hasattr(nn.init, n)}
        try:
            for name, function in kept.items():
                setattr(nn.init, name, self._as_op(name, function))
            with _PretendsCpu(), self:
                yield
        finally:
            for name, function in kept.items():
                setattr(nn.init, name, function)

    def _as_op(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return what notes a call of a function that fills its first argument."""
        signature = inspect.signature(function)

        def noted(*args: Any, **kwargs: Any) -> Tensor:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                bound = signature.bind(*args, **kwargs).arguments
                tensor, generator = bound.pop("tensor"), bound.pop("generator", None)
                if not tensor.is_meta:
                    raise NotReplayableError(f"{name} on a tensor that has values{calling_line()}")
                ref = self._to.ref(tensor)
                self._note_draws(
                    Note(
                        name=name.removeprefix("_no_grad_"),
                        call=function,
                        args=(ref,),
                        kwargs=bound,
                        made=(),
                        reads=frozenset(),
                        writes=frozenset({ref.storage}),
                        covers=self._covered(ref),
                        draws=True,
                        after=self.place(generator or torch.default_generator),
                    ),
                    generator,
                )
                return tensor

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if tensors and not draws and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)  # of values that are known, such as numbers of Python's
        # A number is read (`.item()`): known where no draw decides it.
        if name == "_local_scalar_dense":
            return self._value(args[0])
        if any(device.type not in ("cpu", "meta") for device in _devices(tensors, kwargs)):
            if name != "_to_copy":
                raise NotReplayableError(f"{name} makes a tensor on an accelerator{calling_line()}")
            self._has_moved = True
        written = [
            leaf
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]
        if any(not tensor.is_meta for tensor in written):
            raise NotReplayableError(f"{name} writes into a tensor with values{calling_line()}")
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs["generator"] = None  # of the CPU: it would be refused for meta tensors
        after = START if not draws else self.place(generator or torch.default_generator)
        if draws and (name not in _DRAWS or self._has_moved):
            raise NotReplayableError(f"{name} draws by the values of tensors{calling_line()}")
        # Before the op runs: it may change what these are.
        refs = tree_map(self._taken, (tuple(args), kwargs))
        before = len(self._to.sizes)
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = _META
        made = func(*(_on_meta(args)), **_on_meta(kwargs))
        outputs = tuple(
            self._to.ref(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)
        )
        # Storages are numbered as they are met: an output with a lower number is a view of
        # something.
        fresh = tuple(ref if ref.storage >= before else None for ref in outputs)
        into = [self._to.ref(tensor) for tensor in written]
        # Memory without values, or a view: nothing to do again.
        if name in _ALLOCATES or not (into or any(ref is not None for ref in fresh)):
            return made
        # An op that overwrites all of a storage makes what was before it needless.
        overwritten = frozenset(
            n for ref in into if name in _OVERWRITES for n in self._covered(ref)
        )
        taken = {leaf.storage for leaf in tree_leaves(refs) if isinstance(leaf, Ref)}
        sources = {
            leaf.storage
            for argument, value in _arguments(func, *refs)
            if argument.alias_info is None or not argument.alias_info.is_write
            for leaf in tree_leaves(value)
            if isinstance(leaf, Ref)
        }
        created = {ref.storage for ref in fresh if ref is not None}
        note = Note(
            name=name,
            call=func,
            args=refs[0],
            kwargs={k: v for k, v in refs[1].items() if k not in _NOT_KEPT},
            made=fresh,
            # An op in place reads what it writes into, unless it overwrites all of it.
            reads=frozenset(sources | (taken - overwritten)),
            writes=frozenset({ref.storage for ref in into} | created),
            covers=overwritten | created,
            draws=draws,
            is_pointwise=torch.Tag.pointwise in func.tags,
            after=after,
        )
        if draws:
            self._note_draws(note, generator)
        else:
            self._to.notes.append(note)
        return made

    def place(self, generator: torch.Generator) -> int | Tensor:
        """Return after which note a generator stands, or the state that it was given."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            state = generator.get_state()
            return self._marks.get(digest_of(state), state)

    def _note_draws(self, note: Note, generator: torch.Generator | None) -> None:
        self._mark(generator or torch.default_generator, len(self._to.notes))
        self._to.notes.append(note)

    def _mark(self, generator: torch.Generator, place: int) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            # The generator's state is the mark: it survives what the function does with states,
            # such as saving and restoring them around a fork.
            mark = torch.Generator().manual_seed(_FIRST_MARK + place + 1).get_state()
            self._marks[digest_of(mark)] = place
            if not any(generator is known for known, _ in self.drawn_from):
                self.drawn_from.append((generator, generator.get_state()))
            generator.set_state(mark)

    def _covered(self, ref: Ref) -> frozenset[int]:
        return frozenset({ref.storage} if self._to.is_whole(ref) else ())

    def _taken(self, leaf: Any) -> Any:
        """Return where an argument lies; values that no op made are kept."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return self._to.ref(leaf)
        with _disable_current_modes():
            return self._to.give(leaf)

    def _value(self, tensor: Tensor) -> Any:
        """Return the number that a tensor of one element holds, where no draw decides it."""
        ref = self._to.ref(tensor)
        replay = Replay(self._to, {"": ref})
        if any(self._to.notes[at].draws for at in replay.slices[""]):
            raise NotReplayableError(f"a number that was drawn is read{calling_line()}")
        with _disable_current_modes():
            return replay.whole("", {}).item()


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of a call with what the op's schema says of them."""
    schema = func._schema.arguments
    yield from zip((a for a in schema if not a.kwarg_only), args, strict=False)
    yield from ((a, kwargs[a.name]) for a in schema if a.name in kwargs)


def _devices(tensors: list[Tensor], kwargs: dict[str, Any]) -> Iterator[torch.device]:
    yield from (tensor.device for tensor in tensors)
    if kwargs.get("device") is not None:
        yield torch.device(kwargs["device"])


def _on_meta(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(_META) if isinstance(leaf, Tensor) else leaf, tree)
