"""First values come to their places: rows of whole tensors, sent by rank 0 or made of a seed."""

from __future__ import annotations

import random
from math import prod
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.errors import ModelError
from planner.language.layout.pieces import Piece
from planner.language.layout.placement import Shard
from planner.language.layout.sharing import shard_dim
from planner.runtime.initial import values
from planner.runtime.initial.record import record
from planner.runtime.initial.values import ModuleValues, NoValues, Place, RecordedValues, find
from planner.runtime.process.groups.mesh import Mesh
from tests.spawn import run_ranks

MESSAGE_BYTES = 256


def here() -> Mock:
    """What values take of a mesh: of this process's default group."""
    return Mock(spec=Mesh, device=torch.device("cpu"), control=dist.group.WORLD)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return here()


# ---- places


@pytest.mark.parametrize("seed", range(20))
def test_rows_in_any_order_leave_what_slicing_does(seed):
    """Segments and two cuts of any dims; a rank gets the whole tensor some rows at a time."""
    draw = random.Random(seed)
    shape = [draw.choice([12, 24]) for _ in range(draw.choice([1, 2, 3]))]
    whole = torch.arange(float(prod(shape))).reshape(shape)
    piece, expected = Piece.whole(shape), whole
    for _ in range(2):
        dim, number = draw.randrange(len(shape)), draw.randrange(2)
        segments = draw.choice([s for s in (1, 2, 3) if expected.shape[dim] % (2 * s) == 0])
        piece = piece.cut(Shard(dim, segments), 2, number)
        parts = expected.unflatten(dim, (segments, 2, -1)).select(dim + 1, number)
        expected = parts.flatten(dim, dim + 1)
    place = Place(piece, torch.full(piece.local_shape, -1.0))
    step = draw.choice([1, 5, 100])
    starts = list(range(0, shape[0], step))
    draw.shuffle(starts)
    for first in starts:
        place.take(first, whole[first : first + step])
    assert torch.equal(place.tensor, expected)


def test_a_number_is_taken_whole():
    place = Place(Piece.whole(()), nn.Parameter(torch.tensor(0.0)))
    place.take(0, torch.tensor(3.0))
    assert place.tensor.item() == 3.0


def test_nothing_is_brought_where_values_come_later():
    place = Place(Piece.whole((2,)), torch.zeros(2))
    NoValues().fill({"w": [place]}, ["w"])
    assert place.tensor.tolist() == [0.0, 0.0]


def test_a_tensor_that_is_not_there_is_named():
    module = nn.Sequential(nn.Linear(2, 2))
    found = find(module, "0.weight")
    assert (found.data_ptr(), found.requires_grad) == (module[0].weight.data_ptr(), False)
    with pytest.raises(ModelError, match=r"the model has no tensor '1\.weight'"):
        find(module, "1.weight")


# ---- a module with values


class Kinds(nn.Module):
    """Tensors of several dtypes, of one row and of many messages."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.wide = nn.Parameter(torch.rand(3, 200, generator=draw))
        self.long = nn.Parameter(torch.rand(150, 2, generator=draw))
        self.small = nn.Parameter(torch.rand(2, 2, generator=draw))
        self.number = nn.Parameter(torch.rand((), generator=draw))
        self.register_buffer("exact", torch.rand(5, dtype=torch.float64, generator=draw))
        self.register_buffer("mask", torch.rand(40, generator=draw) < 0.5)
        self.register_buffer("turns", torch.view_as_complex(torch.rand(9, 2, generator=draw)))
        self.register_buffer("count", torch.randint(99, (7,), generator=draw))


def second_half(tensor: torch.Tensor) -> tuple[Place, torch.Tensor]:
    """A place for the second of two shards of a tensor, and what belongs there; all of a number."""
    piece = Piece.whole(tensor.shape)
    if not tensor.dim():
        return Place(piece, torch.zeros_like(tensor)), tensor
    expected = tensor.chunk(2, shard_dim(tensor.shape, 2))[1]
    return Place(piece.chunk(2, 1), torch.zeros_like(expected)), expected


def filled_by_module() -> tuple[list[str], list[int]]:
    """What of rank 0's values differs here, and the bytes of each message."""
    values.MESSAGE_BYTES = MESSAGE_BYTES
    sent = []
    plain = dist.broadcast

    def broadcast(tensor, src):
        sent.append(tensor.nbytes)
        return plain(tensor, src=src)

    dist.broadcast = broadcast
    expected = Kinds(0).state_dict()
    places = {name: [Place(Piece.whole(t.shape), torch.zeros_like(t)), second_half(t)[0]]
              for name, t in expected.items()}  # fmt: skip
    if dist.get_rank() == 1:
        del places["small"]  # each rank holds some; all bring all
    ModuleValues(Kinds(dist.get_rank()), here()).fill(places, list(expected))
    wrong = [
        name
        for name, (whole, half) in places.items()
        if not torch.equal(whole.tensor, expected[name])
        or not torch.equal(half.tensor, second_half(expected[name])[1])
    ]
    return wrong, sent


def test_ranks_get_the_values_of_rank_0_in_messages_of_many_tensors():
    (wrong, sent), other = run_ranks(filled_by_module, 2)
    assert wrong == other[0] == []
    assert sent == other[1]
    row_bytes = 200 * 4  # a row is the least that is sent
    assert max(sent) == row_bytes
    assert sum(size > MESSAGE_BYTES for size in sent) == 3
    total = sum(t.nbytes for t in Kinds(0).state_dict().values())
    assert sum(sent) == total
    # fp32: 3 rows and 1200 bytes in 5, fp64, bool, complex and int one each.
    assert len(sent) <= 3 + 6 + 4


def test_a_module_without_values_is_told(alone):
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="'weight' is on the meta device and has no values"):
        ModuleValues(module, alone).fill({}, ["weight"])


# ---- a recording


def build() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    module.register_buffer("ready", torch.tensor([1.0, 2.0, 3.0]))
    return module


def test_pieces_of_a_recording_are_those_of_the_function(alone):
    torch.manual_seed(3)
    expected = build().state_dict()
    end = torch.get_rng_state()
    for to_the_end in (True, False):
        torch.manual_seed(3)
        recording = record(build)
        # Only the first layer's weight and the buffer lie here.
        places = {name: [second_half(expected[name])[0]] for name in ("0.weight", "ready")}
        RecordedValues(recording, alone, to_the_end=to_the_end).fill(places, list(expected))
        for name, (place,) in places.items():
            assert torch.equal(place.tensor, second_half(expected[name])[1])
        # Draws go on where the function would leave them, or not that far.
        assert torch.equal(torch.get_rng_state(), end) == to_the_end


def test_a_tensor_that_nothing_gives_values_is_told(alone):
    def forgets() -> nn.Module:
        module = nn.Linear(2, 2)
        module.extra = nn.Parameter(torch.empty(3))
        return module

    recording = record(forgets)
    with pytest.raises(ModelError, match="nothing gives 'extra' its first values"):
        RecordedValues(recording, alone).fill({}, ["weight", "extra"])


def test_the_most_memory_is_less_than_the_model_and_no_less_than_its_largest_rows(alone):
    recording = record(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))))
    model_bytes = 40 * (64 * 64 + 64) * 4
    assert 64 * 4 <= RecordedValues.peak_bytes(recording) < model_bytes / 4


def filled_by_recording(differs: bool) -> tuple[bool, bool, str]:
    """Whether rank 0's seed counts, whether draws here go on as they would, and what is refused."""
    torch.manual_seed(3)
    expected = build().state_dict()
    torch.manual_seed(3 + 4 * dist.get_rank())
    own = torch.get_rng_state()
    width = 8 + (dist.get_rank() if differs else 0)
    recording = record(lambda: nn.Sequential(nn.Linear(6, width), *build()[1:]))
    names = [name for name in expected if name != "ready"]
    places = {name: [Place(Piece.whole(expected[name].shape), torch.zeros_like(expected[name]))]
              for name in names}  # fmt: skip
    try:
        RecordedValues(recording, here()).fill(places, names)
    except ModelError as error:
        return False, False, str(error)
    same = torch.equal(places["0.weight"][0].tensor, expected["0.weight"])
    return same, torch.equal(torch.get_rng_state(), own), ""


def test_the_seed_of_rank_0_counts_and_others_keep_their_generators():
    first, second = run_ranks(filled_by_recording, 2, False)
    assert first == (True, False, "")
    assert second == (True, True, "")


def test_functions_that_differ_by_rank_are_refused_by_all():
    told = {refusal for _, _, refusal in run_ranks(filled_by_recording, 2, True)}
    assert len(told) == 1
    assert "does not do the same on all ranks" in told.pop()
