"""N2: a capture is a pure function of the model and of the structure of its batch.

Not of the hash seed, of what was captured or trained before in the process, of values, nor of
the build being on meta or for real.
"""

import functools
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.capture import capture_module, capture_source
from planner.capture.checks.kept_calls import KeptCalls
from planner.capture.source.model_file import ModelSource
from planner.errors import CaptureError
from planner.language.graph.batch import call_with_batch, loss_of
from tests.capture.fingerprints import MODEL_FILE
from tests.model_matrix import REFUSED, model_matrix

ROOT = Path(__file__).parents[2]
TELLING = ["loss-apart", "tied-embedding", "looped-experts"]


def capturable():
    has_transformers = importlib.util.find_spec("transformers") is not None
    return [
        name
        for name, tiny in model_matrix().items()
        if name not in REFUSED and (has_transformers or not tiny.needs_transformers)
    ]


def start(folder, seed, ways, names):
    environment = os.environ | {
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / f"cache-{seed}"),
    }
    command = [sys.executable, "-m", "tests.capture.fingerprints", str(folder), ways, *names]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fingerprints(folder, names, ways_of_seeds):
    """{model: {(seed, way): fingerprint}}; the first process ends before the others begin."""
    for name in names:
        (folder / f"{name}.py").write_text(MODEL_FILE.format(name=name))
    found = {name: {} for name in names}
    waiting = list(enumerate(ways_of_seeds))
    for group in (waiting[:1], waiting[1:]):
        started = [(seed, start(folder, seed, ways, names)) for seed, ways in group]
        try:
            for seed, process in started:
                output, complaints = process.communicate()
                assert process.returncode == 0, complaints
                for name, way, fingerprint in map(json.loads, output.splitlines()):
                    found[name][seed, way] = fingerprint
        finally:
            for _, process in started:
                process.kill()
                process.wait()
    return found


def check(found, ways_of_seeds):
    num_captures = sum(len(ways.split(",")) for ways in ways_of_seeds)
    for name, prints in found.items():
        assert len(prints) == num_captures, name
        assert len(set(prints.values())) == 1, f"{name}: {prints}"
        assert len(next(iter(prints.values()))) == 64, f"{name}: {prints}"


def test_fingerprints_are_equal_in_two_processes(tmp_path):
    """N2: search and launch, each under a hash seed of its own."""
    names = [name for name in TELLING if name in capturable()]
    ways = ["search", "launch"]
    check(fingerprints(tmp_path, names, ways), ways)


NUM_PARTS = 25


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_fingerprints_of_the_matrix_are_equal_in_three_processes(tmp_path, part):
    """N2: the whole matrix, each command and seed; two also capture what they have trained."""
    ways = ["search,launch", "dryrun", "verify,launch"]
    check(fingerprints(tmp_path, capturable()[part::NUM_PARTS], ways), ways)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(model_matrix()))
def test_a_model_of_the_matrix_trains_in_one_process(name):
    tiny = model_matrix()[name]
    if tiny.needs_transformers:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, batch, losses = tiny.build(), tiny.batch(4), []
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(call_with_batch(module, batch), batch, tiny.loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_is_refused_with_its_reason(name):
    tiny = model_matrix()[name]
    if tiny.needs_transformers:
        pytest.importorskip("transformers")
    with pytest.raises(CaptureError, match=re.escape(REFUSED[name])):
        capture_module(tiny.build(), tiny.batch(2), tiny.batch(3), loss=tiny.loss)


# One process, small modules: what an earlier call may leave behind.


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)
        self.start()

    def start(self):
        """What a kind of model sets up."""

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x + self.more(x)))).square().mean()


class KeepsABuffer(Cell):
    def start(self):
        self.register_buffer("table", None, persistent=False)

    def more(self, x):
        if self.table is None:
            self.table = torch.arange(8).cumsum(0)
        return self.table


class HasATensor(Cell):
    def start(self):
        self.scale = torch.arange(8) * 0.1

    def more(self, x):
        return self.scale


class ComputesWithValues(Cell):
    def start(self):
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 4)]

    def more(self, x):
        return self.rates[1]


def cell_batch(size):
    return (torch.randn(size, 8),)


@pytest.mark.parametrize("kind", [KeepsABuffer, HasATensor, ComputesWithValues])
def test_how_a_model_was_built_and_whether_it_was_captured_make_no_difference(kind):
    source = ModelSource(
        path=Path("model.py"), build=kind, batch=cell_batch, loss=None, dependencies=()
    )
    module = kind()
    graphs = [capture_source(source), capture_source(source)]
    graphs += [capture_module(module, cell_batch(2), cell_batch(3)) for _ in range(2)]
    with torch.no_grad():
        graphs.append(capture_module(module, cell_batch(2), cell_batch(3)))
    assert graphs.count(graphs[0]) == 5


def test_a_module_runs_after_its_capture():
    """A capture leaves nothing without values in what functools keeps for the module."""
    tiny = model_matrix()["kept-tables"]
    module = tiny.build()
    capture_module(module, tiny.batch(2), tiny.batch(3))
    loss = module(**tiny.batch(4))
    assert loss.device.type == "cpu"
    loss.backward()


def test_a_cache_of_a_frozen_heap_is_emptied():
    """`gc.freeze`, as programs call it that fork, hides objects from the collector's lists."""
    kept = functools.lru_cache(lambda length: torch.ones(length))
    kept(3)
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        KeptCalls().forget()
        assert gc.get_freeze_count() > 0
    finally:
        if not was_frozen:
            gc.unfreeze()
    assert kept.cache_info().currsize == 0


@functools.cache
def drawn(length):
    return torch.randn(length)


@functools.lru_cache
def shared_scale():
    return nn.Parameter(torch.ones(8))


class KeepsADraw(Cell):
    def more(self, x):
        return drawn(x.shape[-1])


class KeepsADrawItself(KeepsABuffer):
    def more(self, x):
        if self.table is None:
            self.table = torch.randn(8)
        return self.table


class SharesAParameter(Cell):
    def start(self):
        self.scale = shared_scale()

    def more(self, x):
        return F.dropout(self.scale, 0.5, self.training)


@pytest.mark.parametrize(
    ("kind", "where"), [(KeepsADraw, "nothing in the module"), (KeepsADrawItself, "changes table")]
)
def test_a_draw_that_is_kept_is_refused(kind, where):
    """N1: it would be drawn anew in each step."""
    with pytest.raises(CaptureError, match=where):
        capture_module(kind(), cell_batch(2), cell_batch(3))


def test_parameters_that_functools_keeps_stay_shared():
    capture_module(SharesAParameter(), cell_batch(2), cell_batch(3))
    assert SharesAParameter().scale is SharesAParameter().scale is shared_scale()


@pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.to("cuda"),
        lambda module: module.cuda(),
        lambda module: module.to(torch.device("cpu"), torch.bfloat16),
        lambda module: module.cpu().half(),
    ],
)
def test_a_model_that_moves_itself_is_built_without_values(cast, monkeypatch):
    """Planning for a GPU needs none, and no memory for weights."""
    made = []

    def build():
        made.append(cast(HasATensor()).inner.weight)
        return nn.Linear(8, 4)

    source = ModelSource(
        path=Path("model.py"),
        build=build,
        batch=lambda size: torch.randn(size, 8),
        loss=lambda output, batch: output.mean(),
        dependencies=(),
    )
    capture_source(source)
    assert [weight.is_meta for weight in made] == [True]


DEEP = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.checks.on_meta.rehearsal import rehearse

config = GPT2Config(vocab_size=16, n_embd=8, n_layer=1000, n_head=2, n_positions=8)
with torch.device("meta"):
    model = GPT2LMHeadModel(config)
    ids = torch.zeros(2, 8, dtype=torch.long)


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


print(len(rehearse(Loss(), model, (ids,), OnMeta()).reached))
"""


@pytest.mark.slow
def test_a_thousand_layers_are_rehearsed():
    """Autograd's graph of them, freed by its end alone, overflowed the stack of the process."""
    done = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 10_000, "parameters that a gradient reaches"
