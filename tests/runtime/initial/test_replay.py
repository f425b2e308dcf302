"""What a function makes of a seed, made again tensor by tensor: equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.runtime.initial import replay
from planner.runtime.initial.record import record
from planner.runtime.initial.recording import NotReplayableError
from planner.runtime.initial.replay import Replay
from tests.builders import build_hf


class Initialisers(nn.Module):
    """By values, from other tensors, twice, in views, under seeds and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 17, padding_idx=3)
        self.head = nn.Linear(17, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.orthogonal = nn.Linear(40, 40)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.sparse_(self.orthogonal.weight[:4, :4], 0.5)
        self.truncated = nn.Linear(64, 64)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        nn.init.trunc_normal_(self.truncated.bias, std=2.0, a=-1, b=1)
        self.linear = nn.Linear(17, 33)
        self.copied = nn.Parameter(self.linear.weight.detach().clone())
        self.linear.weight.data.mul_(0.5)
        frequencies = 1 / 10000 ** (torch.arange(0, 6, 2).float() / 6)
        self.register_buffer("angles", torch.outer(torch.arange(8.0), frequencies))
        self.norm = nn.BatchNorm1d(4)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.drawn = nn.Parameter(torch.randn(3, 37))
        self.order = nn.Parameter(torch.randperm(9).float())
        self.mask = nn.Parameter(torch.empty(40).bernoulli_(0.3))
        self.scale = nn.Parameter(torch.tensor(3.0))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.forked = nn.Parameter(torch.rand(8, 8))
        self.after = nn.Parameter(torch.rand(8, 8))
        own = torch.Generator().manual_seed(9)
        self.own = nn.Parameter(torch.randn(5, 5, generator=own))
        self.owns = nn.Parameter(torch.empty(5, 20).normal_(generator=own))
        self.transposed = nn.Parameter(torch.zeros(8, 8))
        self.transposed.data.copy_(self.forked.data.t())
        self.attention = nn.MultiheadAttention(8, 2)
        assert self.own.device.type == "cpu"


class Large(nn.Module):
    """Tensors of many pieces, of other sizes than groups of 16, drawn once or twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(513, 100)
        nn.init.normal_(self.linear.weight, std=0.02)
        self.linear.weight.data.mul_(0.3).add_(0.1).erfinv_()
        self.embedding = nn.Embedding(3001, 7)
        self.flat = nn.Parameter(torch.empty(10003))
        nn.init.normal_(self.flat)
        self.zeros = nn.Parameter(torch.zeros(4000))
        self.drawn = nn.Parameter(torch.randn(700, 11) * 0.02)


def in_dtype(dtype: torch.dtype) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return Large()
        finally:
            torch.set_default_dtype(before)

    return build


@pytest.mark.parametrize(
    "build",
    [
        Initialisers,
        *map(in_dtype, (torch.float32, torch.float64, torch.bfloat16)),
        lambda: Large().to(torch.bfloat16),
        lambda: build_hf("LlamaForCausalLM"),
        lambda: build_hf("GPT2LMHeadModel"),
    ],
    ids=["initialisers", "fp32", "fp64", "bf16", "cast", "llama", "gpt2"],
)
def test_replayed_values_are_those_of_the_function(build, monkeypatch):
    """Of all tensors, and of each third of them, for which the others' draws are dropped."""
    monkeypatch.setattr(replay, "PIECE_BYTES", 4096)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    expected = tensors(build())
    end = torch.get_rng_state()
    torch.set_rng_state(state)
    recording = record(build)
    assert torch.equal(torch.get_rng_state(), state)
    named = tensors(recording.module)
    assert list(named) == list(expected)
    refs = {name: recording.ref(t) for name, t in named.items() if t.is_meta}
    for names in (list(refs), *(list(refs)[at::3] for at in range(3))):
        found = {name: torch.full_like(expected[name], 7) for name in names}
        reached = Replay(recording, {name: refs[name] for name in names}).run(
            state, {name: into(found[name]) for name in names}
        )
        assert [n for n in names if not torch.equal(found[n], expected[n])] == []
        assert torch.equal(reached, end)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def into(whole: Tensor) -> replay.Sink:
    def take(first: int, rows: Tensor) -> None:
        place = whole[first : first + rows.shape[0]] if whole.dim() else whole
        place.copy_(rows)

    return take


def test_what_is_made_in_pieces_is_never_whole(monkeypatch):
    monkeypatch.setattr(replay, "PIECE_BYTES", 4096)
    recording = record(Large)
    refs = {name: recording.ref(t) for name, t in tensors(recording.module).items()}
    largest: dict[str, int] = dict.fromkeys(refs, 0)

    def sink(name: str) -> replay.Sink:
        def take(first: int, rows: Tensor) -> None:
            largest[name] = max(largest[name], rows.nbytes)

        return take

    made = Replay(recording, refs)
    made.run(torch.get_rng_state(), {name: sink(name) for name in refs})
    # A piece has whole rows in whole groups of 16 elements: 16 rows of 513, at the worst.
    assert max(largest.values()) <= 16 * 513 * 4
    assert largest["flat"] <= 4096 + 16 * 4
    assert made.origin("embedding.weight") == "normal_()"
    assert made.origin("zeros") == "zeros([4000])"


def test_what_depends_on_drawn_values_is_refused_where_it_is():
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        if layer.weight.sum().item() > 0:
            nn.init.zeros_(layer.bias)
        return layer

    with pytest.raises(NotReplayableError, match=r"a number that was drawn is read.*test_replay"):
        record(build)


def test_recordings_of_other_values_differ():
    def build(width: float) -> Callable[[], nn.Module]:
        def built() -> nn.Module:
            layer = nn.Linear(4, 4)
            nn.init.normal_(layer.weight, std=width)
            layer.scale = nn.Parameter(torch.tensor(width))
            return layer

        return built

    digests = []
    for width in (0.1, 0.1, 0.2):
        recording = record(build(width))
        digests.append(recording.digest({}))
    assert digests[0] == digests[1] != digests[2]
