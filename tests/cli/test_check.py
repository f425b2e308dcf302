"""V13: `planner check` tells every rule that hand-written Megatron flags break, and prices them."""

import json
import re
import sys

import pytest

from planner.emit import emit, find_emitter
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_rules import Run, broken_rules
from planner.emit.targets.megatron_lm import megatron_flags
from tests.emit.views import view_of

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 "
    "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 "
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16"
)


def broken(line: str, gpus: int = 16, **model: int) -> list[str]:
    return broken_rules(Run(flags=parse_flags(line), num_devices=gpus, model=model))


def test_the_example_of_thirty_layers(planner):
    line = (
        "--num-layers 30 --pipeline-model-parallel-size 2 --micro-batch-size 1 "
        "--num-layers-per-virtual-pipeline-stage 4"
    )
    found = planner("check", line, "--gpus", 2)
    assert found.code == 2
    assert found.stderr == (
        "planner: 15 layers of a pipeline rank are not divisible by "
        "--num-layers-per-virtual-pipeline-stage 4; use 1, 3, 5, 15\n"
    )


def test_a_yaml_without_its_reader_says_what_to_install(planner, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "run.yaml"
    path.write_text("parallelism: {}\n")
    complaint = planner("check", path, "--gpus", 2).complaint
    assert "PyYAML, which is not installed; install it: pip install 'planner[yaml]'" in complaint


def test_every_broken_rule_is_told_in_a_line(planner):
    line = LLAMA.replace("-size 4 ", "-size 3 ").replace("batch-size 128", "batch-size 127")
    found = planner("check", line + " --num-experts 6 --expert-model-parallel-size 4", "--gpus", 20)
    assert found.code == 2
    lines = found.stderr.splitlines()
    assert [line.removeprefix("planner: ").split(";")[0] for line in lines] == [
        "tensor 3 * pipeline 2 * context 1 = 6 ranks do not divide the 20 devices",
        "--tensor-model-parallel-size 3 does not divide --num-attention-heads 32",
        "--expert-model-parallel-size 4 does not divide --num-experts 6",
        "expert 4 * expert tensor 3 * pipeline 2 = 24 ranks do not divide the 20 devices",
        "--seq-length 8192 over 1 context-parallel ranks is not divisible by "
        "--tensor-model-parallel-size 3, which --sequence-parallel splits it over",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"--num-attention-heads 32": "--num-attention-heads 30"}, "does not divide --num-att"),
        ({"--hidden-size 4096": "--hidden-size 4100"}, "does not divide --hidden-size 4100"),
        ({"--num-layers 32": "--num-layers 33"}, "33 layers are not divisible by 2 pipeline ranks"),
        ({"batch-size 128": "batch-size 127"}, "--global-batch-size 127 is not divisible"),
        ({"--micro-batch-size 1": ""}, "--micro-batch-size is not given"),
        ({"--seq-length 8192": "--seq-length 8190"}, "8190 over 1 context-parallel ranks"),
        ({"--seq-length 8192": "--seq-length 16384"}, "is more than --max-position-embeddings"),
        ({"--overlap-grad-reduce": ""}, "--overlap-param-gather needs --overlap-grad-reduce"),
        ({"--use-distributed-optimizer": ""}, "needs --use-distributed-optimizer or --use-meg"),
        ({"--use-distributed-optimizer": "--use-precision-aware-optimizer"},
         "--use-precision-aware-optimizer needs --use-distributed-optimizer"),
        ({"--bf16": "--bf16 --exp-avg-dtype bf16"},
         "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer"),
        ({"--bf16": "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 "
         "--accumulate-allreduce-grads-in-fp32"}, "allreduce-grads-in-fp32 were given; give one"),
        ({"--bf16": "--bf16 --fp16"}, "--bf16 and --fp16 were given"),
        ({"--bf16": "--recompute-granularity full"}, "full needs --recompute-method"),
        ({"--bf16": "--recompute-granularity ful"}, "it takes full, selective"),
        ({"--bf16": "--sequence-paralel"}, "did you mean --sequence-parallel?"),
        ({"--bf16": "--bf16 --num-layers 3 --num-layers 4"}, "--num-layers is given twice"),
        ({"--bf16": "--bf16 yes"}, "--bf16 takes no value; yes was given"),
        ({"--bf16": "--num-experts 8.5"}, "--num-experts 8.5 was given; it takes a number"),
        ({"--bf16": "--num-experts 6 --expert-model-parallel-size 4"}, "does not divide --num-exp"),
        ({"--bf16": "--expert-model-parallel-size 2"}, "needs --num-experts"),
        ({"--bf16": "--group-query-attention --num-query-groups 6"}, "no multiple and no divisor"),
        ({"--bf16": "--group-query-attention --multi-latent-attention"}, "give one of them"),
        ({"--bf16": "--mtp-num-layers 1 --pipeline-model-parallel-layout Et*16|t*16L"},
         "has 0 layers that predict ahead (m) and --mtp-num-layers is 1"),
        ({"--bf16": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"}, "give native"),
        ({"--bf16": "--rampup-batch-size 1 2"}, "--rampup-batch-size takes three values; 1 2 was"),
        ({"--bf16": "--num-experts $EXPERTS"}, "is a variable of the shell; give its value"),
        ({"--bf16": "--q-lora-rank -1"}, "it takes a number of at least 0"),
        ({"--bf16": "--context-parallel-size 3"}, "= 24 ranks do not divide the 16 devices"),
        ({"--bf16": "--num-virtual-stages-per-pipeline-rank 3"}, "are not divisible by --num-virt"),
        ({"--bf16": "--pipeline-model-parallel-layout Et*16|t*15L"}, "has 31 layers (t) and"),
        ({"--bf16": "--pipeline-model-parallel-layout Et*8|t*8|t*16L"}, "has 3 stages, which"),
        ({"--bf16": "--pipeline-model-parallel-layout t*16|Et*16L"}, "needs the embedding (E)"),
        ({"--bf16": "--pipeline-model-parallel-layout Et*16|x"}, "has 'x'; it is written with E"),
        ({"--bf16": "--pipeline-model-parallel-layout t*99999|"}, "repeats more than 4096 times"),
        ({"--bf16": "--decoder-first-pipeline-num-layers 33"}, "are not 33 on the first"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_rule(changes, told):
    line = LLAMA
    for before, after in changes.items():
        assert before in line
        line = line.replace(before, after, 1)
    found = broken(line)
    assert [text for text in found if told in text], found


def test_virtual_stages():
    deep = LLAMA.replace("-parallel-size 2", "-parallel-size 8").replace("size 4 ", "size 2 ")
    virtual = deep + " --num-layers-per-virtual-pipeline-stage 2"
    assert not broken(virtual)
    few = virtual.replace("batch-size 128", "batch-size 4")
    assert broken(few) == [
        "4 microbatches with virtual stages are fewer than --pipeline-model-parallel-size 8"
    ]
    odd = virtual.replace("batch-size 128", "batch-size 12")
    assert "are no multiple of --pipeline-model-parallel-size 8" in broken(odd)[0]
    group = " --microbatch-group-size-per-virtual-pipeline-stage "
    assert not broken(virtual.replace("batch-size 128", "batch-size 20") + group + "10", gpus=16)
    ten = virtual.replace("batch-size 128", "batch-size 10") + group
    assert broken(ten + "9") == [
        "--microbatch-group-size-per-virtual-pipeline-stage 9 leaves a last group of 1 of 10 "
        "microbatches, fewer than --pipeline-model-parallel-size 8"
    ]
    assert "7 is not from --pipeline-model-parallel-size 8 to the 10" in broken(ten + "7")[0]
    both = virtual + " --num-virtual-stages-per-pipeline-rank 2"
    assert "give one of them" in broken(both)[0]
    flat = LLAMA.replace(
        "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"
    )
    assert "need --pipeline-model-parallel-size 2 or more" in broken(flat)[0]


def test_a_line_that_contradicts_the_model_is_told():
    assert broken(LLAMA, **{"num-layers": 30}) == ["--num-layers 32 was given and the model has 30"]


def test_sound_flags_are_priced(planner):
    found = planner("check", LLAMA, "--model", "llama-3-8b", "--gpus", 16)
    assert found.code == 0, found.stderr
    assert "no rule is broken" in found.stdout
    step = re.search(r"step time  (\S+ \S+), (\S+ \S+) to (\S+ \S+) in 4 of 5 cases", found.stdout)
    assert step
    assert re.search(r"\S+ GiB to \S+ GiB in 4 of 5 cases, from ", found.stdout)
    sized = "layers=32,hidden=4096,heads=32,kv_heads=8,ffn_hidden=14336,vocab=128256,gated_ffn=1"
    same = planner("check", LLAMA, "--model", sized, "--gpus", 16)
    assert same.stdout == found.stdout


def test_flags_from_a_file_and_options_of_no_part_in_the_price(planner, tmp_path):
    """Options of Megatron-LM that are of no part are not told; those of other scripts are."""
    script = tmp_path / "run.sh"
    script.write_text(
        f"torchrun pretrain_gpt.py \\\n    {LLAMA} --lr $LR --data-path 1 a 2 b --my-own 3 # low\n"
    )
    found = planner("check", script, "--model", "llama-3-8b", "--gpus", 16)
    assert found.code == 0
    assert found.stderr.splitlines()[1:] == [
        "not of Megatron-LM's options, of no part in the price: --my-own"
    ]


def test_what_is_not_priced_is_a_line_each(planner):
    line = f"{LLAMA} --optimizer muon --fine-grained-activation-offloading --v-head-dim 64"
    found = planner("check", line + " --multi-latent-attention", "--gpus", 16)
    assert found.code == 2
    assert [
        text.removeprefix("planner: ").split(": ")[0] for text in found.stderr.splitlines()
    ] == [
        "--optimizer",
        "--fine-grained-activation-offloading",
        "--v-head-dim 64 with --qk-head-dim 128",
        "--multi-latent-attention",
    ]


def test_what_is_assumed_is_said_with_what_it_may_change(planner):
    line = LLAMA.replace("--seq-length 8192", "").replace("--max-position-embeddings 8192", "")
    found = planner("check", f"{line} --tokenizer-type GPTSentencePieceTokenizer", "--gpus", 16)
    assert found.code == 0
    told = found.stderr.splitlines()
    assert "assumed: seq_len=4096, which may change time and memory of all layers" in told
    assert (
        "assumed: vocab=51200, which may change the embedding, the output matrix and the logits"
        in told
    )


def test_sequence_parallelism_without_tensor_parallelism_is_a_note(planner):
    found = planner("check", LLAMA.replace("-parallel-size 4", "-parallel-size 1"), "--gpus", 16)
    assert found.code == 0
    assert "--sequence-parallel: Megatron-LM switches it off" in found.stderr


def test_a_script_that_was_emitted_is_sound(planner, tmp_path):
    view = view_of()
    (tmp_path / "run.sh").write_text(
        emit(view, find_emitter("megatron-lm")).files["megatron-lm.sh"]
    )
    found = planner("check", "run.sh", "--gpus", view.plan.world_size, "--model", "llama-3-8b")
    assert found.code == 0, found.stderr


def test_emitted_flags_are_sound():
    for cells in ({}, {"vpp": 1, "layers": 30}, {"zero_stage": 3, "cp": 2, "gpus": 32}):
        view = view_of(**cells)
        line = " ".join(f"--{name} {value}" for name, value in megatron_flags(view).items())
        assert not broken(line, gpus=view.plan.world_size)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--gpus", 0), "--gpus 0 was given"),
        (("--gpus", 16, "--model", "my-own-model"), "give a model file, or sizes"),
        (("--gpus", 16, "--model", "layers=x"), "is no size; write NAME=NUMBER"),
        (("--gpus", 16, "--model", "llama-3-8b", "--gpu", "abacus"), "abacus"),
    ],
)
def test_bad_input_is_a_line(planner, arguments, told):
    found = planner("check", LLAMA, *arguments)
    assert found.code == 2
    assert told in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_check_tells_memory_with_its_interval_and_the_limit(planner):
    found = planner("check", LLAMA, "--model", "llama-3-8b", "--gpus", 16, "--json")
    told = json.loads(found.stdout)
    held = told["memory_interval"]
    assert held["low_bytes"] < told["peak_bytes"] < held["high_bytes"]
    assert told["peak_tensor_bytes"] < told["peak_bytes"]
    assert told["limit_bytes"] > 79 * 2**30


MIXTRAL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--ffn-hidden-size 2048 --vocab-size 32000 --swiglu --micro-batch-size 1 "
    "--global-batch-size 64 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --bf16"
)


def test_experts_are_told_with_what_brings_rows_to_them(planner):
    """B11: the line's dispatcher, and how uneven rows are, as it is given or as the record says."""
    usual = planner("check", MIXTRAL, "--gpus", 8)
    assert "rows of experts by deepep; the rank that gets most has 1.18 times the mean" in (
        usual.stdout
    )
    told, even = (
        json.loads(
            planner("check", MIXTRAL, "--gpus", 8, "--expert-imbalance", sigma, "--json").stdout
        )
        for sigma in (0.66, 0)
    )
    assert told["experts"]["dispatchers"] == ["deepep"]
    assert told["experts"]["fullest"] == pytest.approx(2.24, abs=0.01)
    assert even["experts"]["fullest"] == 1
    assert told["step_s"] > even["step_s"]
    assert told["peak_tensor_bytes"] > even["peak_tensor_bytes"]
    refused = planner("check", MIXTRAL, "--gpus", 8, "--expert-imbalance", 9)
    assert refused.code == 2
    assert "--expert-imbalance 9 was given; it is the standard deviation" in refused.stderr
