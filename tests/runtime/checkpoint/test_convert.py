"""D15: Between checkpoints, safetensors and state dicts; and models that begin from such files."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.checkpoint.convert import convert
from planner.runtime.checkpoint.folder import checkpoints_in, read_manifest
from planner.runtime.checkpoint.weight_files.safetensors_files import (
    Named,
    read_file,
    read_folder,
    write_file,
)
from planner.runtime.checkpoint.weight_files.sources import open_source
from tests.builders import gpt_batch
from tests.frozen import TiedGPT
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks

safetensors = pytest.importorskip("safetensors.torch", reason="the hf extra is not installed")


@pytest.fixture
def module() -> TiedGPT:
    return build("tied-gpt")[1]


@pytest.fixture
def trained(tmp_path) -> tuple[Path, dict[str, Tensor]]:
    """A folder of checkpoints of a tied GPT on one rank, and its state."""
    plan = default_plan(capture("tied-gpt"))
    engine = planner.apply(plan, build("tied-gpt")[1])
    engine.step(gpt_batch(plan.global_batch))
    engine.save(tmp_path / "run")
    engine.wait_for_save()
    return tmp_path / "run", engine.full_state_dict()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_there_and_back_is_the_same_to_the_last_bit(trained, tmp_path):
    """checkpoint -> safetensors -> checkpoint -> .pt -> single file -> .pt; tied names once."""
    run, state = trained
    steps = ["weights", "again", "model.pt", "one.safetensors", "last.pt"]
    done = []
    source = run
    for name in steps:
        done.append(convert(source, tmp_path / name))
        source = tmp_path / name
    assert [d.kind for d in done] == [
        *("safetensors", "checkpoint", "state-dict", "safetensors", "state-dict")
    ]
    stored = safetensors.load_file(tmp_path / "weights" / "model.safetensors")
    tied = set(state) - set(stored)
    assert tied == {"head.weight"}
    assert_same(stored, {name: t for name, t in state.items() if name not in tied})
    # As a plain script would load it: tied names share, here as in the module.
    loaded = torch.load(tmp_path / "last.pt")
    assert_same(loaded, {name: t for name, t in state.items() if name not in tied})


def test_a_state_dict_of_a_checkpoint_has_all_names(trained, tmp_path, module):
    run, state = trained
    convert(run, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt")
    assert_same(found, state)
    module.load_state_dict(found)
    assert found["head.weight"].data_ptr() == found["token.weight"].data_ptr()


def test_shards_and_their_index(trained, tmp_path):
    """As Hugging Face writes them, and read back by slices."""
    run, state = trained
    convert(run, tmp_path / "shards", shard_bytes=40_000)
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "shards").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files[0] == f"model-00001-of-{count:05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    for file in files:
        held = safetensors.load_file(tmp_path / "shards" / file)
        assert held
        for name, tensor in held.items():
            assert index["weight_map"][name] == file
            assert torch.equal(tensor, state[name])
        assert sum(t.nbytes for t in held.values()) <= 40_000
    source = open_source(tmp_path / "shards")
    part = source.read("token.weight", ((3, 9), (8, 32)))
    assert torch.equal(part, state["token.weight"][3:9, 8:32])


def test_dtypes_of_safetensors(tmp_path):
    """Each that the format has, written by us and by its library, read by the other."""
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
    dtypes += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.float8_e4m3fn]
    values = {str(d): (torch.arange(7) % 2).to(d) for d in dtypes}
    values |= {"number": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    named = [Named(n, tuple(t.shape), t.dtype, lambda t=t: t) for n, t in values.items()]
    write_file(tmp_path / "a.safetensors", named)
    safetensors.save_file(values, tmp_path / "b.safetensors")
    for name, tensor in safetensors.load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(tensor.float(), values[name].float())
        assert tensor.dtype == values[name].dtype
    for name, tensor in read_file(tmp_path / "b.safetensors").items():
        assert torch.equal(tensor.float(), values[name].float())
        assert tensor.dtype == values[name].dtype


def test_a_checkpoint_as_a_plans_ranks_write_it(trained, tmp_path):
    """A file for each rank of the plan; loaded the same; optimizer and counts are carried."""
    run, _ = trained
    graph = capture("tied-gpt")
    plan = default_plan(graph, pp=2, tp=2, dp=1)
    done = convert(run, tmp_path / "cut", plan=plan, graph=graph)
    files = read_manifest(done.path).files
    assert {f"__{rank}_0.distcp" for rank in range(4)} < set(files)
    old, new = (planner.apply(default_plan(graph), build("tied-gpt")[1]) for _ in range(2))
    assert old.load(run).step == new.load(tmp_path / "cut").step == 1
    assert_same(new.full_state_dict(), old.full_state_dict())
    batch = gpt_batch(old.plan.global_batch)
    assert [new.step(batch).item() for _ in range(2)] == [old.step(batch).item() for _ in range(2)]


def most_held(folder: Path) -> int:
    """Bytes of memory that is no file's, above the start: there and back through a run's folder."""
    held = []
    # What is imported at first use is no tensor.
    safetensors.save_file({"w": torch.ones(1)}, folder / "small.safetensors")
    convert(folder / "small.safetensors", folder / "small")
    convert(folder / "small", folder / "small-again")
    start = anonymous_bytes()

    def watch(fraction: float, doing: str) -> None:
        held.append(anonymous_bytes() - start)

    convert(folder / "in.safetensors", folder / "run", progress=watch)
    convert(folder / "run", folder / "out", shard_bytes=10**7, progress=watch)
    return max(held)


def test_no_more_than_a_tensor_is_held(tmp_path, monkeypatch):
    """Of forty tensors of 4 MB. The allocator gives each back at once, as it does larger ones."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    values = {f"w{n:02d}": torch.full((1000, 1000), float(n)) for n in range(40)}
    safetensors.save_file(values, tmp_path / "in.safetensors")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(most_held, tmp_path).result() < 1.5 * 4_000_000
    found = read_folder(tmp_path / "out")
    assert all((found[f"w{n:02d}"] == n).all() for n in range(40))


def test_what_can_not_be_converted_is_refused(trained, tmp_path):
    run, _ = trained
    graph = capture("tied-gpt")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "bad.pt").write_bytes(b"x" * 20)
    torch.save({"a": 1}, tmp_path / "other.pt")
    (tmp_path / "notes.txt").write_text("")
    cases = [
        ((tmp_path / "none", tmp_path / "out"), {}, "does not exist; give a checkpoint"),
        ((tmp_path / "bad.safetensors", tmp_path / "out"), {}, "is not safetensors, or is damaged"),
        ((tmp_path / "bad.pt", tmp_path / "out"), {}, "can't be read as a state_dict"),
        ((tmp_path / "other.pt", tmp_path / "out"), {}, "is no state_dict of a model"),
        ((tmp_path / "notes.txt", tmp_path / "out"), {}, "has none of the suffixes"),
        ((run, tmp_path / "notes.txt"), {}, "notes.txt exists; name a file or folder"),
        ((run, tmp_path / "a.pt"), {"kind": "safetensors"}, "a.pt can't be a safetensors"),
        ((run, tmp_path / "a"), {"kind": "state-dict"}, "a can't be a state-dict"),
        ((run, tmp_path / "a"), {"kind": "gguf"}, "kind 'gguf' is unknown"),
        ((run, tmp_path / "a.pt"), {"plan": default_plan(graph), "graph": graph}, "a plan cuts"),
    ]
    for paths, options, says in cases:
        with pytest.raises(PlanError, match=says):
            convert(*paths, **options)
    (checkpoint,) = checkpoints_in(run)
    data = (checkpoint / "__0_0.distcp").read_bytes()
    (checkpoint / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(PlanError, match=r"__0_0\.distcp has \d+ bytes of"):
        convert(run, tmp_path / "out")


# -- beginning from files ---------------------------------------------------------------------


def begin_from(cases: list[tuple[Plan, Path]]) -> list[dict[str, Tensor]]:
    """The whole state under each plan of a model built without values."""
    found = []
    for plan, path in cases:
        with torch.device("meta"):
            module = TiedGPT()
        engine = planner.apply(plan, module, weights=path)
        found.append(engine.full_state_dict())
        engine.step(gpt_batch(plan.global_batch))
        engine.close()
    return found


def test_a_model_without_values_begins_from_files(trained, tmp_path):
    """On two ranks each reads its slices: of shards, one file, a state dict, a checkpoint."""
    run, state = trained
    for name in ("shards", "one.safetensors", "model.pt"):
        convert(run, tmp_path / name, shard_bytes=40_000)
    graph = capture("tied-gpt")
    tp, zero, pp = (
        default_plan(graph, **c) for c in ({"tp": 2}, {"dp": 2, "zero_stage": 3}, {"pp": 2})
    )
    names = ["shards", "one.safetensors", "model.pt", "run"]
    cases = [(p, tmp_path / name) for p, name in zip((tp, zero, pp, tp), names, strict=True)]
    by_rank = run_ranks(begin_from, 2, cases)
    for found in by_rank[0]:
        assert_same(found, state)


def test_weights_of_another_model_are_refused(trained, tmp_path):
    run, _ = trained
    engine = planner.apply(default_plan(capture("mlp")), build("mlp")[1])
    with pytest.raises(PlanError, match=r"has no fc1\.weight, nor 5 others of the model"):
        engine.load_weights(run)
    safetensors.save_file({"fc1.weight": torch.zeros(3, 3)}, tmp_path / "w.safetensors")
    with pytest.raises(PlanError, match=r"fc1\.weight has shape \(3, 3\) there and \(32, 8\)"):
        engine.load_weights(tmp_path / "w.safetensors")


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    text = Path("/proc/self/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 96, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


@pytest.mark.parametrize("make", [_gpt2, _llama])
@pytest.mark.parametrize("shard_bytes", [10_000, 10**9], ids=["shards", "one file"])
def test_a_hugging_face_model_is_loaded_from_what_was_written(make, shard_bytes, tmp_path):
    """GPT-2 ties its head, Llama has one of its own; `from_pretrained` finds class and sizes."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    model = make()
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    with torch.device("meta"):
        empty = make()
    folder = tmp_path / "out"
    done = convert(
        tmp_path / "trained.pt", folder, kind="safetensors", model=empty, shard_bytes=shard_bytes
    )
    assert done.has_config
    assert (folder / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(loaded) is type(model)
    assert not any(told.values())
    assert_same(loaded.state_dict(), model.state_dict())
    assert (loaded.generation_config.eos_token_id) == model.generation_config.eos_token_id


def test_a_config_is_of_the_weights_and_goes_into_a_folder(tmp_path, module):
    torch.save(module.state_dict(), tmp_path / "a.pt")
    other = TiedGPT()
    other.token.weight = torch.nn.Parameter(torch.zeros(1))
    for model, told in [
        (torch.nn.Linear(2, 2), "which the model has not"),
        (other, r"token.weight is .* in .* and \(1,\) in the model"),
    ]:
        with pytest.raises(PlanError, match=told):
            convert(tmp_path / "a.pt", tmp_path / "out", kind="safetensors", model=model)
        assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match="name a folder, or leave the model out"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors", model=module)
    done = convert(tmp_path / "a.pt", tmp_path / "out", kind="safetensors", model=module)
    assert not done.has_config
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["model.safetensors"]
