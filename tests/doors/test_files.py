"""What a config.json, a script, a toml or a DeepSpeed json says of a model and its run."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from commands.doors import Asked, Opened, open_model
from commands.doors.deepspeed import read_deepspeed
from planner.errors import PlannerError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "torch_dtype": "bfloat16",
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
FAMILIES: dict[str, tuple[dict, dict]] = {
    "llama": (LLAMA, {"seq_length": 8}),
    "bert": (
        {"architectures": ["BertForMaskedLM"], "model_type": "bert", **SMALL},
        {"seq_length": 8},
    ),
    "classifier": (
        {"architectures": ["BertForMaskedLM"], "model_type": "bert", **SMALL},
        {"seq_length": 8, "task": "text-classification"},
    ),
    "tags": ({"model_type": "bert", **SMALL}, {"seq_length": 8, "task": "token-classification"}),
    "t5": (
        {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "d_model": 32,
            "d_ff": 64,
            "d_kv": 8,
            "num_heads": 4,
            "num_layers": 2,
            "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
        {"seq_length": 8},
    ),
    "vit": (
        {
            "architectures": ["ViTForImageClassification"],
            "model_type": "vit",
            "image_size": 32,
            "patch_size": 8,
            **{n: v for n, v in SMALL.items() if n != "vocab_size"},
        },
        {},
    ),
    "whisper": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": 32,
            **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
            "vocab_size": 64,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        {"seq_length": 8},
    ),
}

MEGATRON = r"""#!/bin/bash
GPUS_PER_NODE=8
NODES=2
SEQ=128
ARGS=(
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length $SEQ
    --max-position-embeddings $SEQ --micro-batch-size 2 --global-batch-size 64 --bf16
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --group-query-attention --num-query-groups 2 --vocab-size 1000
    --ffn-hidden-size 96 --clip-grad 1.0
)
PARALLEL=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --use-distributed-optimizer --recompute-activations)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NODES pretrain_gpt.py ${ARGS[@]} ${PARALLEL[@]}
"""

TITAN = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
seq_len = 128
local_batch_size = 2
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(path: Path, text: str, **asked: object) -> tuple[dict, Opened]:
    path.write_text(text)
    file, found = open_model(path, Asked(**asked))  # type: ignore[arg-type]
    assert found is not None
    return runpy.run_path(str(file)), found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_json_is_a_model_with_batches(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    values, asked = FAMILIES[name]
    (tmp_path / name).mkdir()
    file, found = opened(tmp_path / name / "config.json", json.dumps(values), **asked)
    torch.manual_seed(0)
    loss = file["model"]()(**file["batch"](2)).loss
    assert torch.isfinite(loss)
    assert found.name == name
    assert open_model(tmp_path / name, Asked(**asked))[1] == found  # the folder is the same
    assert found.trained == ({"precision": "bf16"} if name == "llama" else {})


def test_a_megatron_script_is_a_decoder_and_its_run(tmp_path: Path) -> None:
    file, found = opened(tmp_path / "train.sh", MEGATRON)
    sizes = file["SIZES"]
    told = (sizes.layers, sizes.hidden, sizes.kv_heads, sizes.ffn_hidden, sizes.seq_len)
    assert told == (4, 64, 2, 96, 128)
    assert (sizes.vocab, sizes.norm, sizes.gated, sizes.dropout) == (1024, "rms", True, False)
    assert torch.isfinite(file["model"]()(**file["batch"](1)))
    assert found.trained == {
        "precision": "bf16",
        "clip_gradients": True,
        "execution": "megatron-core",
        "gpus": 16,
        "global_batch": 64,
    }
    assert found.layout == {
        "tp": 2, "pp": 2, "vpp": 1, "cp": 1, "zero": 1, "microbatch_size": 2,
    }  # fmt: skip


def test_a_torchtitan_toml_is_a_decoder_and_its_run(tmp_path: Path) -> None:
    file, found = opened(tmp_path / "llama.toml", TITAN, gpus=16)
    sizes = file["SIZES"]
    assert (sizes.layers, sizes.hidden, sizes.vocab, sizes.seq_len) == (6, 256, 2048, 128)
    assert found.trained == {
        "precision": "bf16",
        "clip_gradients": True,
        "execution": "torchtitan",
        "global_batch": 8,  # two of each of 16 / (2 * 2) replicas
    }
    assert found.layout == {"tp": 2, "cp": 1, "pp": 2, "zero": 2, "recompute": "full"}


def test_a_deepspeed_json_is_a_run(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "bf16": {"enabled": True},
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "expert_parallel": {"enabled": True, "autoep_size": 4},
            }
        )
    )
    trained, layout, _ = read_deepspeed(path, 8)
    assert trained["global_batch"] == 64
    assert trained["precision"] == "bf16"
    assert trained["clip_gradients"]
    assert layout == {
        "tp": 1, "pp": 1, "zero": 3, "microbatch_size": 2, "offload": "optimizer", "ep": 4,
    }  # fmt: skip


def test_fp16_is_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"fp16": {"enabled": True}, "bf16": {"enabled": False}}))
    assert read_deepspeed(path, 8)[0]["precision"] == "fp16"
    _, found = opened(tmp_path / "run.sh", MEGATRON.replace("--bf16", "--fp16"), gpus=16)
    assert found.trained["precision"] == "fp16"


def without(values: dict, *names: str) -> dict:
    return {name: value for name, value in values.items() if name not in names}


CONFIGS: dict[str, tuple[str, dict, str]] = {
    "no length": (json.dumps(LLAMA), {}, "give --seq-length, in tokens, at most 16"),
    "too long": (json.dumps(LLAMA), {"seq_length": 17}, "from 1 to 16 positions"),
    "no json": ("{", {}, "is no JSON"),
    "no model_type": (json.dumps(without(LLAMA, "model_type")), {}, "has no model_type"),
    "of DeepSpeed": ('{"zero_optimization": {}}', {}, "--deepspeed"),
    "of another library": (
        json.dumps({**LLAMA, "model_type": "nollama", "auto_map": {}}),
        {},
        "by code that it would fetch",
    ),
    "no task": (
        json.dumps({**LLAMA, "architectures": ["LlamaModel"]}),
        {"seq_length": 8},
        "give --task: llama has causal-lm",
    ),
    "a wrong task": (
        json.dumps(LLAMA),
        {"task": "image-classification"},
        "llama of .* has causal-lm",
    ),
    "an unknown task": (json.dumps(LLAMA), {"task": "dance"}, "--task dance is not known"),
    "odd sizes": (
        json.dumps({**LLAMA, "hidden_size": "wide"}),
        {"seq_length": 8},
        "is refused by transformers",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_json_lacks_is_told_in_a_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    text, asked, told = CONFIGS[name]
    with pytest.raises(PlannerError, match=told) as raised:
        opened(tmp_path / "config.json", text, **asked)
    assert "\n" not in str(raised.value)


OTHERS: dict[str, tuple[str, str, dict, str]] = {
    "no model": ("x.toml", "[profile]\n", {}, "a cluster file goes to --cluster"),
    "flavor": ("x.toml", TITAN.replace("debugmodel", "9B"), {}, "known are debugmodel, 8B"),
    "model": ("x.toml", TITAN.replace("llama3", "flux"), {}, "known are llama3, qwen3"),
    "length": ("x.toml", TITAN, {"seq_length": 64}, "says 128"),
    "degree": ("x.toml", TITAN.replace("= 2\npipe", "= 0\npipe"), {}, "takes 1 or more"),
    "toml": ("x.toml", "[", {}, "is no toml"),
    "mamba": ("x.sh", f"{MEGATRON} --hybrid-layer-pattern M", {}, "layers of other kinds"),
    "flag": ("x.sh", MEGATRON.replace("linear", "liner"), {}, "did you mean --disable-bias-linear"),
    "variable": ("x.sh", MEGATRON.replace("SEQ=128", ""), {}, "is a variable of the shell"),
    "task": ("x.sh", MEGATRON, {"task": "masked-lm"}, "trains a causal-lm"),
    "nothing": ("x.txt", "hello", {}, "none of the files that a model is read from"),
    "python": ("x.py", "", {"seq_length": 8}, "leave --seq-length out"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_files_lack_is_told_in_a_line(tmp_path: Path, name: str) -> None:
    file, text, asked, told = OTHERS[name]
    with pytest.raises(PlannerError, match=told) as raised:
        opened(tmp_path / file, text, **asked)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        (json.dumps(LLAMA), "is no DeepSpeed configuration"),
        ('{"zero_optimization": {"stage": 4}}', "takes 0 to 3"),
        ('{"zero_optimization": {"offload_param": {"device": "cpu"}}}', "not priced"),
        ('{"train_batch_size": -1}', "takes 1 or more"),
        ('{"bf16": 1}', "takes a section"),
        ('{"expert_parallel": {"enabled": true, "autoep_size": 0}}', "autoep_size 0; it takes 1"),
    ],
)
def test_what_is_wrong_with_a_deepspeed_json_is_told_in_a_line(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(PlannerError, match=told):
        read_deepspeed(tmp_path / "ds.json", 8)


LARGE = "9" * 5000
BROKEN = {
    "deep.json": ("[" * 100_000, "is no JSON .it nests too deeply"),
    "large.json": (f'{{"model_type": "llama", "hidden_size": {LARGE}}}', "is no JSON"),
    "deep.toml": ("a=" + "[" * 100_000, "is no toml .it nests too deeply"),
    "large.toml": (f"a={LARGE}", "is no toml"),
    "architectures.json": ('{"model_type": "llama", "architectures": 3}', "takes a list of names"),
    "vocabulary.json": (json.dumps({**LLAMA, "vocab_size": 0}), "vocabulary is 0"),
    "type.json": (json.dumps({**LLAMA, "hidden_size": "32"}), "expected int, got str"),
    "enable.toml": (TITAN + "[compile]\nenable = 'false'", "takes a value like False"),
    "batch.toml": (TITAN.replace("seq_len", "global_batch_size = true\nseq_len"), "like -1"),
    "clip.toml": (TITAN.replace("seq_len", "max_norm = nan\nseq_len"), "a value like 1.0"),
    "clip.sh": (MEGATRON.replace("--clip-grad 1.0", "--clip-grad x"), "--clip-grad x was given"),
    "heads.sh": (MEGATRON.replace("heads 4", "heads 3").replace("groups 2", "groups 3"),
                 "hidden-size 64 is no multiple of --num-attention-heads 3"),
    "large.sh": (MEGATRON.replace("--hidden-size 64", "--hidden-size " + "9" * 20), "large.sh: "),
    "quotes.sh": ("what is --num-layers? I don't know", "quotes.sh: the flags can't be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_told_in_a_line(tmp_path: Path, name: str) -> None:
    if name.endswith("json"):
        pytest.importorskip("transformers")
    text, says = BROKEN[name]
    length = 8 if name.endswith("json") else None
    with pytest.raises(PlannerError, match=says) as refused:
        opened(tmp_path / name, text, seq_length=length)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("size", [[32], [3, 32, 32]])
def test_pictures_of_no_two_sides_are_told(tmp_path: Path, size: list[int]) -> None:
    pytest.importorskip("transformers")
    values = {**FAMILIES["vit"][0], "image_size": size}
    with pytest.raises(PlannerError, match=r"image_size .* takes a number, or two"):
        opened(tmp_path / "config.json", json.dumps(values))


def test_what_a_config_says_of_stored_weights_makes_no_other_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    stored = {
        "quantization_config": {"quant_method": "gptq", "bits": 4},
        "_attn_implementation": "flash_attention_2",
    }
    marked = "\ufeff" + json.dumps({**LLAMA, **stored})
    file, found = opened(tmp_path / "config.json", marked, seq_length=8)
    assert file["model"]()(**file["batch"](2)).loss.isfinite()
    assert any("quantization_config is left out" in note for note in found.notes)


def test_an_encoder_for_a_causal_task_looks_back_only(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values = FAMILIES["bert"][0]
    file, _ = opened(tmp_path / "c.json", json.dumps(values), seq_length=8, task="causal-lm")
    model = file["model"]().eval()
    ids = torch.arange(8)[None]
    other = ids.clone()
    other[0, -1] = 20
    with torch.no_grad():
        before, after = model(ids).logits, model(other).logits
    torch.testing.assert_close(before[:, :-1], after[:, :-1])


def test_a_cache_that_can_t_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(PlannerError, match=r"can't be written .*XDG_CACHE_HOME"):
        opened(tmp_path / "train.sh", MEGATRON)


def test_what_deepspeed_leaves_to_a_trainer_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "bf16": {"enabled": "auto"},
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}},
            }
        )
    )
    trained, layout, _ = read_deepspeed(path, 4)
    assert trained == {"execution": "deepspeed-zero3"}
    assert layout == {"tp": 1, "pp": 1, "zero": 3}


@pytest.mark.parametrize(
    "values",
    [
        {"zero_optimization": {"stage": True}},
        {"zero_optimization": {"stage": 2.0}},
        {"gradient_clipping": "1"},
        {"gradient_clipping": float("nan")},
        {"bf16": {"enabled": "true"}},
    ],
    ids=str,
)
def test_deepspeed_values_of_another_kind_are_told(tmp_path: Path, values: dict) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    with pytest.raises(PlannerError, match="; it takes "):
        read_deepspeed(path, 4)


def test_options_of_a_line_that_sets_several_are_taken(tmp_path: Path) -> None:
    text = MEGATRON.replace("SEQ=128", "SEQ=64; SEQ=128; OTHER=1")
    text = text.replace("torchrun", "[ $SEQ -gt 64 ] && NODES=4\ntorchrun") + "wait\n"
    file, found = opened(tmp_path / "train.sh", text.replace("]}\nwait", "]} 2>&1 | tee log\nwait"))
    assert file["SIZES"].seq_len == 128
    assert found.trained["gpus"] == 32
