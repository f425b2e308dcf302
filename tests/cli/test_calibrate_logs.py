"""B17: `planner calibrate` learns from logs and traces of the stacks that people run."""

import json
import re
from pathlib import Path

import pytest

from costmodel.runtime_calibration import next_run
from profiles import load_profile

H100 = "h100-sxm5-80gb"

SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 5632,
    "vocab_size": 32000,
}

FLAGS = """\
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 2048 \\
  --num-attention-heads 16 --ffn-hidden-size 5632 --swiglu --disable-bias-linear \\
  --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights \\
  --hidden-dropout 0 --attention-dropout 0 --seq-length 2048 --max-position-embeddings 2048 \\
  --vocab-size 32000 --micro-batch-size 2 --global-batch-size {batch} --bf16 \\
  --tensor-model-parallel-size {tp} --sequence-parallel --use-distributed-optimizer \\
  --overlap-grad-reduce --overlap-param-gather
"""

TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""

NANOTRON = """\
general: {project: small}
model:
  dtype: bfloat16
  model_config:
    num_hidden_layers: 8
    hidden_size: 2048
    num_attention_heads: 16
    num_key_value_heads: 8
    intermediate_size: 5632
    vocab_size: 32000
    hidden_act: silu
    tie_word_embeddings: false
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
parallelism: {dp: 4, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER, pp_engine: 1f1b}
tokens: {sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 4}
"""

ZERO = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
}

CONFIG = {"model_type": "llama", "hidden_act": "silu", **SIZES}


def megatron(folder: Path, seconds: float, *, tp: int = 2, batch: int = 64) -> None:
    """A run of Megatron-LM: a script, and a log with a warm-up and a step that saves."""
    folder.mkdir(parents=True)
    (folder / "pretrain.sh").write_text(FLAGS.format(tp=tp, batch=batch))
    times = [5 * seconds, *[seconds] * 9, 3 * seconds, *[seconds] * 9]
    lines = ["using world size: 8, data-parallel size: 4"]
    lines += [
        f" iteration {10 * step:8}/ 200 | elapsed time per iteration (ms): {1e3 * each:.3f} | "
        f"global batch size: {batch:5} |"
        for step, each in enumerate(times, start=1)
    ]
    (folder / "train.log").write_text("\n".join(lines))


def torchtitan(folder: Path, seconds: float) -> None:
    folder.mkdir()
    (folder / "llama3_8b.toml").write_text(TITAN)
    tps = 4 * 4096 / seconds / 8
    (folder / "job.log").write_text(
        "Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]\n"
        + "".join(
            f"step: {step:2}  loss: 7.0  memory: 30.00GiB(37.9%)  tps: {round(tps):,}  mfu: 30.0%\n"
            for step in (1, 10, 20, 30)
        )
    )


def nanotron(folder: Path, seconds: float) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(NANOTRON)
    (folder / "log.out").write_text(
        "".join(
            f"[INFO|DP=0|PP=0|TP=0|n]: iteration: {step} / 20 | "
            f"elapsed_time_per_iteration_ms: {1e3 * seconds:.4g} | tokens_per_sec: 80K | "
            "tokens_per_sec_per_gpu: 10K | global_batch_size: 32\n"
            for step in range(1, 9)
        )
    )


def deepspeed(folder: Path, seconds: float) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "ds_config.json").write_text(json.dumps(ZERO))
    (folder / "run.toml").write_text("gpus = 8\nseq_len = 2048\n")
    (folder / "train.log").write_text(
        "".join(
            f"epoch=0/micro_step={step}/global_step={step}, RunningAvgSamplesPerSec=1.0, "
            f"CurrSamplesPerSec={64 / seconds}, MemAllocated=4.3GB, MaxMemAllocated=21.5GB\n"
            for step in range(10, 80, 10)
        )
    )


def hugging_face(folder: Path, seconds: float) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "run.toml").write_text(
        "gpus = 8\nseq_len = 2048\nglobal_batch = 16\nmicro_batch = 2\nzero_stage = 3\n"
    )
    told = {"train_runtime": 100 * seconds, "train_steps_per_second": round(1 / seconds, 3)}
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": 100, "log_history": [told]})
    )


STACKS = {
    "Megatron-LM": (megatron, "megatron-core"),
    "torchtitan": (torchtitan, "torchtitan"),
    "nanotron": (nanotron, "nanotron"),
    "DeepSpeed": (deepspeed, "deepspeed-zero3"),
    "Hugging Face Trainer": (hugging_face, "fsdp-flash"),
}


@pytest.mark.parametrize("stack", STACKS)
def test_each_stack_from_its_log_to_a_corrected_profile(planner, tmp_path, stack):
    """A run is read beside its configuration, priced, and what it took longer is learned."""
    write, runtime = STACKS[stack]
    write(tmp_path / "run", 1.0)
    found = planner("calibrate", "run", "--gpu", "H100", "--out", "mine", "--json")
    assert found.code == 0, found.stderr
    (run,) = json.loads(found.stdout)["runs"]
    assert run["stack"] == stack
    assert (
        run["runtime"].startswith(runtime.partition("-zero3")[0]) or run["runtime"] == "fsdp-flash"
    )
    assert run["measured_step_s"] == pytest.approx(1.0, rel=1e-3)
    parts = sum(part["predicted_s"] for part in run["parts"].values())
    assert parts == pytest.approx(run["predicted_step_s"], rel=1e-6)
    known = load_profile("mine").file.runtime_calibrations[run["runtime"]]
    assert known.runs[0].evidence[0].stack == stack
    more = run["measured_step_s"] > run["predicted_step_s"]
    assert (known.factors["kernels"].value > 1) == more


@pytest.fixture
def predicted(planner, tmp_path):
    """Seconds of the Megatron-LM run as the shipped profile has them, by tp."""

    def price(tp: int, *more: str, batch: int = 64):
        path = tmp_path / f"tp{tp}.sh"
        path.write_text(FLAGS.format(tp=tp, batch=batch))
        found = planner("check", path, "--gpus", 8, "--json", *more)
        assert found.code == 0, found.stderr
        return json.loads(found.stdout)

    return price


def test_two_runs_narrow_the_interval_of_a_third(planner, tmp_path, predicted):
    """A cluster that takes 1.15 times what is predicted: later checks and searches say so."""
    slower = 1.15
    for tp, batch in ((1, 64), (2, 64), (2, 128)):
        megatron(
            tmp_path / f"tp{tp}-{batch}",
            slower * predicted(tp, batch=batch)["step_s"],
            tp=tp,
            batch=batch,
        )
    done = planner("calibrate", "tp1-64", "tp2-64", "tp2-128", "--gpu", "H100", "--out", "mine")
    assert done.code == 0, done.stderr
    assert "17 readings of its step (without 2 that warm up and 1 far from others)" in done.stdout
    assert "megatron-core: calibrated by 3 runs of Megatron-LM" in done.stdout
    before = predicted(4)
    after = predicted(4, "--profile", "mine")
    truth = slower * before["step_s"]
    assert abs(after["step_s"] / truth - 1) < 0.5 * abs(before["step_s"] / truth - 1)
    assert after["interval"]["basis"] == "3 runs of Megatron-LM that it was calibrated by"
    assert after["interval"]["low_s"] < truth < after["interval"]["high_s"]
    (known,) = load_profile("mine").file.runtime_calibrations.values()
    relative_before, relative_after = next_run("megatron-core", known)
    assert relative_after < relative_before
    # (Of a fourth run unlike the others as well: none had as much of its step on the links.)
    width = after["interval"]["high_s"] / after["interval"]["low_s"]
    assert (width - 1) / (width + 1) < relative_before
    (note,) = [each for each in after["notes"] if each.startswith("calibrated by")]
    assert re.fullmatch(r"calibrated by 3 runs of Megatron-LM: .*kernels x 1\.\d\d.*", note)
    shown = planner("profile", "show", "mine").stdout
    assert "megatron-core: calibrated by 3 runs of Megatron-LM" in shown
    assert "train.log (" in shown


def test_the_same_log_counts_once_and_more_runs_are_added(planner, tmp_path):
    megatron(tmp_path / "first", 1.0)
    megatron(tmp_path / "second", 1.2, batch=128)
    for given in (("first",), ("first",), ("first", "second")):
        assert planner("calibrate", *given, "--gpu", "H100", "--out", "mine").code == 0
    (known,) = load_profile("mine").file.runtime_calibrations.values()
    assert len(known.runs) == 2
    # Nor is anything learned from what was corrected already.
    again = planner("calibrate", "first", "--profile", "mine", "--json").stdout
    fresh = planner("calibrate", "first", "--gpu", "H100", "--out", "other", "--json").stdout
    steps = [json.loads(each)["runs"][0]["predicted_step_s"] for each in (again, fresh)]
    assert steps[0] == steps[1]


def test_a_trace_tells_the_parts(planner, tmp_path):
    """With a trace beside the log it is said which part differs."""
    megatron(tmp_path / "run", 1.0)
    events = []
    for step in range(4):
        start = step * 1e6
        events += [
            {"ph": "X", "cat": "gpu_user_annotation", "name": f"ProfilerStep#{step}", "ts": start,
             "dur": 9e5},
            {"ph": "X", "cat": "kernel", "name": "nvjet_gemm", "ts": start, "dur": 8e5},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING", "ts": start + 7e5,
             "dur": 2e5},
        ]  # fmt: skip
    held = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}], "traceEvents": events}
    (tmp_path / "run" / "rank0.pt.trace.json").write_text(json.dumps(held))
    found = planner("calibrate", "run", "--out", "mine", "--json")
    assert found.code == 0, found.stderr
    (run,) = json.loads(found.stdout)["runs"]
    measured = {name: part["measured_s"] for name, part in run["parts"].items()}
    assert measured == pytest.approx(
        {"kernels": 0.8, "collectives": 0.1, "host": 0.1, "waits": 0.0}
    )
    assert run["kinds_s"] == pytest.approx({"products": 0.8, "all_gather": 0.2})
    assert [each["stack"] for each in run["evidence"]] == ["Megatron-LM", "torch.profiler"]
    shown = planner("calibrate", "run", "--out", "mine").stdout
    assert re.search(r"kernels differ most: \S+ \S+ more than predicted", " ".join(shown.split()))


def test_memory_moves_what_is_usable(planner, tmp_path):
    """A runtime that holds more than estimated has its interval moved."""
    deepspeed(tmp_path / "run", 1.0)
    found = planner("calibrate", "run", "--gpu", "H100", "--out", "mine", "--json")
    assert found.code == 0, found.stderr
    memory = json.loads(found.stdout)["runs"][0]["memory"]
    assert memory["of"] == "allocated"
    assert memory["measured_bytes"] == round(21.5 * 2**30)
    (known,) = load_profile("mine").file.runtime_calibrations.values()
    ratio = memory["measured_bytes"] / memory["predicted_bytes"]
    assert known.runs[0].memory_ratio == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "nowhere is no file; give a run's folder"),
        (["empty"], "empty has no log that is known"),
        (["run/train.log"], "does not say on which device"),
        (["run/train.log,run/notes.txt"], "notes.txt is neither a log that is known nor"),
        (["run"], "does not say on which device it ran; give --gpu"),
        (["run", "--gpu", "H100", "--profile", "a100-sxm4-80gb"], "give that profile, or one cal"),
        (["bad", "--gpu", "H100"], "which is no column of a run; did you mean global_batch?"),
        (["broken", "--gpu", "H100"], "broken/pretrain.sh: "),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(planner, tmp_path, arguments, told):
    megatron(tmp_path / "run", 1.0)
    (tmp_path / "run" / "notes.txt").write_text("it went well")
    megatron(tmp_path / "bad", 1.0)
    (tmp_path / "bad" / "run.toml").write_text("globl_batch = 8\n")
    megatron(tmp_path / "broken", 1.0, tp=3)
    (tmp_path / "empty").mkdir()
    refused = planner("calibrate", *arguments, "--out", "mine")
    assert told in refused.complaint
    assert not (tmp_path / "mine").exists()
