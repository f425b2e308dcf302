"""N2, N4: a stack of layers captured in part is the graph that capturing all of it gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture import capture_module, module
from planner.capture.export import export_batch
from planner.errors import CaptureError
from planner.language.graph import ModelGraph

WIDTH, LAYERS = 8, 10


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, 4, WIDTH), torch.zeros(size, 4, WIDTH)


def text(size: int) -> dict[str, Tensor]:
    ids = torch.zeros(size, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def num_layers(model: nn.Module) -> int:
    return sum(len(part) for part in model.modules() if isinstance(part, nn.ModuleList))


def in_part_and_whole(
    monkeypatch: Any, model: nn.Module, make: Callable[[int], Any], **options: Any
) -> tuple[ModelGraph, ModelGraph, int]:
    """Return both captures, and how many layers the first exported.

    Where those are all, it is the capture of the whole, and not made again.
    """
    exported: list[int] = []

    def counted(copy: nn.Module, *args: Any, **kwargs: Any) -> Any:
        exported.append(num_layers(copy))
        return export_batch(copy, *args, **kwargs)

    monkeypatch.setattr(module, "export_batch", counted)
    part = capture_module(model, make(2), make(3), **options)
    of_part = exported[-1]
    if of_part == exported[0] == num_layers(model):
        return part, part, of_part
    monkeypatch.setattr(module, "capture_in_part", lambda *args, **kwargs: None)
    whole = capture_module(model, make(2), make(3), **options)
    return part, whole, of_part


class Layer(nn.Module):
    """A residual layer with a norm."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.scale * torch.tanh(self.up(self.norm(x)))
        return x if other is None else x + 0.5 * other


class Counting(nn.Module):
    """A layer that counts its forwards in a buffer, and keeps a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x + self.up(x) - self.mean


class Stack(nn.Module):
    """Layers one after the other, with something that one of them does otherwise."""

    def __init__(self, layers: list[nn.Module], how: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        seen = []
        for index, layer in enumerate(self.layers):
            match self.how:
                case "reads the first layer":
                    x = layer(x, seen[0] if seen else None)
                case "reads two layers back":
                    x = layer(x, seen[-2] if len(seen) > 1 else None)
                case "adds at some layers":
                    x = layer(x)
                    x = x + 1.0 if index in (2, 7) else x
                case "is gated" | "has a gate without gradient":
                    x = layer(x)
                    is_cut_off = index == 7 and self.how != "is gated"
                    with torch.no_grad() if is_cut_off else nullcontext():
                        gate = torch.cos(x)  # the same op either way
                    x = x * gate
                case "scales by its place":
                    x = layer(x) / (index + 1)
                case "scales by the number of layers":
                    x = layer(x) / len(self.layers)
                case _:
                    x = layer(x)
            seen.append(x)
        if self.how == "sums over layers":
            x = torch.stack(seen).sum(0)
        if self.how == "reads a layer in the middle":
            x = x + seen[3]
        return F.mse_loss(self.last(x), target)


def _frozen_half() -> Stack:
    stack = Stack([Layer() for _ in range(LAYERS)])
    for layer in stack.layers[: LAYERS // 2]:
        layer.requires_grad_(False)
    return stack


class Odd(nn.Module):
    """A layer like its neighbours in class and shapes; at its number it does something else."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.number, self.how, self.calls = number, how, 0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        is_odd = self.number == ODD
        match self.how:
            case "scales":
                x = x * (2.0 if is_odd else 1.0)
            case "skips":
                x = x if is_odd else x + 1.0
            case "has no gradient":
                x = x + (torch.tanh(x.detach()) if is_odd else torch.tanh(x))
            case "calls a function":
                x = Doubled.apply(x) if is_odd else x * 2.0
            case "writes in place":
                y = self.up(x)
                y += x
                y[:, 0] *= 0.5
                x = torch.relu_(y)
            case "asks where a tensor is from":
                x = x * (1.0 if self.up(x).grad_fn is None else 3.0)
            case "keeps a table":
                if self.table is None:
                    self.table = torch.arange(WIDTH, dtype=torch.float32)
                x = x + self.table
            case "counts":
                self.calls += is_odd
            case "draws":
                x = x * 2.0 if is_odd and random.random() < 0.5 else x * 1.0
            case "by the course of the run":
                RUNS.append(is_odd)
                x = x * 2.0 if is_odd and sum(RUNS) > 1 else x
        return x + self.up(x)


class Doubled(torch.autograd.Function):
    """Twice a tensor, with three times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3.0


ODD, RUNS = 5, []


def _odd(how: str) -> Stack:
    RUNS.clear()
    return Stack([Odd(number, how) for number in range(LAYERS)])


class Delay(nn.Module):
    """Hands what it makes by a weight on through two layers before it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        first, second = given
        return x + self.up(x) * first.mean(), second, torch.tanh(self.late(x.detach()))


class Delayed(Stack):
    """A stack of those."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.first(x)
        given = (x.detach(), x.detach())
        for layer in self.layers:
            x, *given = layer(x, *given)
        return F.mse_loss(self.last(x), target)


def _tied() -> Stack:
    stack = Stack([Layer() for _ in range(LAYERS)])
    for layer in stack.layers[1:]:
        layer.up.weight = stack.layers[0].up.weight
    return stack


def _same_module_again() -> Stack:
    layer = Layer()
    return Stack([layer] * LAYERS)


def _layers(*scales: float, count: int = LAYERS) -> list[nn.Module]:
    return [Layer(scales[k % len(scales)]) for k in range(count)]


STACKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "equal": (lambda: Stack(_layers(1.0)), True),
    "alternating": (lambda: Stack(_layers(1.0, 0.5, count=12)), True),
    "reads the first layer": (lambda: Stack(_layers(1.0), "reads the first layer"), True),
    "another first layer": (lambda: Stack([Layer(2.0), *_layers(1.0)]), True),
    "another last layer": (lambda: Stack([*_layers(1.0), Layer(2.0)]), False),
    "reads two layers back": (lambda: Stack(_layers(1.0), "reads two layers back"), False),
    "adds at some layers": (lambda: Stack(_layers(1.0), "adds at some layers"), False),
    "gated": (lambda: Stack(_layers(1.0), "is gated"), True),
    "a gate without gradient": (
        lambda: Stack(_layers(1.0), "has a gate without gradient"),
        False,
    ),
    "scales by its place": (lambda: Stack(_layers(1.0), "scales by its place"), False),
    "scales by the number": (lambda: Stack(_layers(1.0), "scales by the number of layers"), False),
    "sums over layers": (lambda: Stack(_layers(1.0), "sums over layers"), False),
    "reads one in the middle": (lambda: Stack(_layers(1.0), "reads a layer in the middle"), False),
    "rising drop rates": (lambda: Stack([Layer(k / LAYERS) for k in range(LAYERS)]), False),
    "frozen half": (_frozen_half, False),
    "tied": (_tied, False),
    "the same module again": (_same_module_again, False),
    "another in the middle": (lambda: Stack([*_layers(1.0), Layer(2.0), *_layers(1.0)]), True),
    "scales by its number": (lambda: _odd("scales"), False),
    "skips by its number": (lambda: _odd("skips"), False),
    "has no gradient by its number": (lambda: _odd("has no gradient"), False),
    "a function by its number": (lambda: _odd("calls a function"), False),
    "writes in place": (lambda: _odd("writes in place"), True),
    "asks where a tensor is from": (lambda: _odd("asks where a tensor is from"), True),
    "keeps a table": (lambda: _odd("keeps a table"), True),
    "gradients that come late": (lambda: Delayed([Delay() for _ in range(LAYERS)]), False),
    "buffers written": (lambda: Stack([Counting() for _ in range(LAYERS)]), True),
}
"""Stacks by what is odd in them, and whether layers may be left out."""


@pytest.mark.parametrize("what", STACKS)
def test_stacks(monkeypatch: Any, what: str) -> None:
    build, leaves_out = STACKS[what]
    model = build()
    part, whole, exported = in_part_and_whole(monkeypatch, model, batch)
    assert part == whole
    assert part.fingerprint == whole.fingerprint
    assert (exported < len(model.layers)) == leaves_out


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("counts", r"forward changes layers.5.calls \(1, then 2\)"),
        ("draws", "forward draws random numbers from Python"),
        ("by the course of the run", "the second forward computes something else than the first"),
    ],
)
def test_what_one_layer_does_beside_is_refused(how: str, told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        capture_module(_odd(how), batch(2), batch(3))


def _hugging_face(name: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")
    known = set(config().to_dict())
    with torch.device("meta"):
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        architecture = name.removesuffix("Text") + head
        return getattr(transformers, architecture)(
            config(**{k: v for k, v in (common | sizes).items() if k in known or k in sizes})
        )


def _t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 64}
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, num_layers=9, decoder_start_token_id=0)
        )


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _hugging_face("Llama", num_hidden_layers=10),
    "gpt2": lambda: _hugging_face("GPT2", n_layer=10, n_embd=32, n_head=4),
    "mixtral": lambda: _hugging_face("Mixtral", num_hidden_layers=9, num_local_experts=4),
    "gemma2": lambda: _hugging_face("Gemma2", num_hidden_layers=12, sliding_window=8),
    "gemma3": lambda: _hugging_face("Gemma3Text", num_hidden_layers=26, sliding_window=8),
    "t5": _t5,
}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n != "llama")]
)
def test_families(monkeypatch: Any, name: str) -> None:
    model = FAMILIES[name]()
    layers = num_layers(model)
    part, whole, exported = in_part_and_whole(monkeypatch, model, text)
    assert part == whole
    assert exported < layers


def test_precision_is_that_of_the_whole(monkeypatch: Any) -> None:
    part, whole, exported = in_part_and_whole(
        monkeypatch, Stack(_layers(1.0)), batch, precision="bf16"
    )
    assert part == whole
    assert exported < LAYERS
