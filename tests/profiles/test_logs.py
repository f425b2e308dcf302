"""Logs of other stacks: what their lines say of a step, and which readings count."""

import gzip
import json

import pytest

from planner.errors import PlannerError
from planner.units import GIB, MIB
from profiles.logs import find_log, read_log
from profiles.logs.record import steady_of


def read(tmp_path, text: str, name: str = "train.log"):
    path = tmp_path / name
    path.write_text(text)
    return read_log(path)


def test_megatron_tells_milliseconds_and_memory_of_the_fullest_rank(tmp_path):
    found = read(
        tmp_path,
        "using world size: 16, data-parallel size: 2\n"
        " [2026-01-02 03:04:05.678901] iteration       10/     100 | consumed samples:  1280 | "
        "elapsed time per iteration (ms): 9876.5 | throughput per GPU (TFLOP/s/GPU): 210.5 | "
        "learning rate: 1.0E-04 | global batch size:   128 | lm loss: 9.1E+00 |\n"
        "[Rank 0] (after 10 iterations) memory (MB) | allocated: 100.0 | max allocated: 2000.5 | "
        "reserved: 2100.0 | max reserved: 2200.0\n"
        "[Rank 8] (after 10 iterations) memory (MB) | allocated: 100.0 | max allocated: 1500.5 | "
        "reserved: 2100.0 | max reserved: 2300.0\n"
        " iteration       20/     100 | elapsed time per iteration (ms): 5000.0 | lm loss: 8 |\n",
    )
    assert (found.stack, found.unit) == ("Megatron-LM", "seconds")
    assert found.readings == (9.8765, 5.0)
    assert found.allocated_bytes == 2000.5 * MIB
    assert found.reserved_bytes == 2300.0 * MIB
    assert found.said["gpus"] == 16
    assert found.said["global_batch"] == 128


def test_torchtitan_tells_tokens_of_a_device_in_colours(tmp_path):
    found = read(
        tmp_path,
        "[titan] - root - INFO - Building 2-D device mesh with ['dp_shard', 'tp'], [4, 2]\n"
        "[titan] - root - INFO - CUDA capacity: NVIDIA H100 with 94.99GiB memory\n"
        "[titan] - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2  \x1b[38;5;208mgrad_norm: "
        "1.5  \x1b[33mmemory: 40.00GiB(42.1%)  \x1b[34mtps: 1,000  \x1b[36mtflops: 50.0  "
        "\x1b[35mmfu: 5%\x1b[39m\n"
        "step: 10  loss: 10.0  memory: 47.50GiB(50.0%)  tps: 6,123  tflops: 250.1  mfu: 25.2%\n"
        "validate step: 10  loss: 10.0  memory: 60.00GiB(50.0%)  tps: 9,999\n",
    )
    assert (found.stack, found.unit) == ("torchtitan", "tokens_per_s_per_device")
    assert found.readings == (1000.0, 6123.0)
    assert found.reserved_bytes == 47.5 * GIB
    assert found.said["gpus"] == 8
    assert found.said["gpu"] == "NVIDIA H100"


def test_nanotron_shortens_its_numbers(tmp_path):
    found = read(
        tmp_path,
        "[default0]:01/02/2026 03:04:05 [INFO|DP=0|PP=0|TP=0|node7]:  Memory usage: 900.5MiB. "
        "Peak allocated 1200.25MiB. Peak reserved: 1300.0MiB\n"
        "01/02/2026 03:04:05 [INFO|DP=0|PP=0|TP=0|node7]: iteration: 5 / 20 | consumed_tokens: "
        "1.31M | elapsed_time_per_iteration_ms: 1.25K | tokens_per_sec: 210K | "
        "tokens_per_sec_per_gpu: 26.2K | global_batch_size: 64 | lm_loss: 10.5 | lr: 0.0003\n"
        "iteration: 6 / 20 | consumed_tokens: 1.57M | elapsed_time_per_iteration_ms: 950 | "
        "tokens_per_sec: 276K | tokens_per_sec_per_gpu: 34.5K | global_batch_size: 64\n",
    )
    assert found.stack == "nanotron"
    assert found.readings == (1.25, 0.95)
    assert found.allocated_bytes == 1200.25 * MIB
    assert found.said["gpus"] == 8
    assert found.said["global_batch"] == 64


def test_deepspeed_tells_the_rate_of_a_step_or_the_pipelines_seconds(tmp_path):
    timer = read(
        tmp_path,
        "[2026-01-02 03:04:05,678] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/"
        "global_step=10, RunningAvgSamplesPerSec=20.5, CurrSamplesPerSec=25.5, "
        "MemAllocated=4.32GB, MaxMemAllocated=38.49GB\n",
    )
    assert (timer.stack, timer.unit) == ("DeepSpeed", "samples_per_s")
    assert timer.readings == (25.5,)
    assert timer.allocated_bytes == 38.49 * GIB
    pipeline = read(tmp_path, "steps: 10 loss: 3.1000 iter time (s): 1.250 samples/sec: 51.200\n")
    assert (pipeline.unit, pipeline.readings) == ("seconds", (1.25,))


def test_a_trainer_tells_by_its_bar_else_of_the_whole_run(tmp_path):
    bar = read(
        tmp_path,
        " 10%|#         | 1/10 [00:09<01:21,  9.00s/it]\r 20%|##        | 2/10 [00:10<00:40,  "
        "2.00s/it]\r{'loss': 2.1}\n 20%|##        | 2/10 [00:10<00:40,  2.00s/it]\r 30%|###       "
        "| 3/10 [00:11<00:14,  2.00it/s]\r100%|###| 4/4 [00:00<00:00, 50.00it/s]\n"
        "{'train_runtime': 30.0, 'train_samples_per_second': 4.0, 'train_steps_per_second': 0.3}\n",
    )
    assert bar.stack == "Hugging Face Trainer"
    assert bar.readings == (9.0, 2.0, 0.5)
    state = {
        "global_step": 60,
        "log_history": [{"train_runtime": 90.0, "train_steps_per_second": 0.7}],
    }
    assert read(tmp_path, json.dumps(state), "trainer_state.json").readings == (1.5,)


def kernel(name: str, start: float, end: float, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args}


def mark(step: int, start: float, end: float, cat: str = "gpu_user_annotation"):
    return {"ph": "X", "cat": cat, "name": f"ProfilerStep#{step}", "ts": start, "dur": end - start}


STEP = (
    kernel("sm90_xmma_gemm_bf16", 0, 40),
    kernel("flash_fwd_kernel", 40, 50),
    kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", 45, 65),
    kernel("ncclDevKernel_Generic(args)", 70, 80, **{"Collective name": "_allgather_base"}),
    kernel("ncclDevKernel_SendRecv(args)", 60, 75),
    kernel("vectorized_elementwise_kernel", 72, 74),
)
"""Microseconds 0 to 100: kernels 52, other collectives alone 23, messages alone 5, nothing 20."""


def trace(tmp_path, steps: int, *, cat: str = "gpu_user_annotation"):
    events = [{"ph": "M", "name": "process_name"}]
    for step in range(steps):
        events.append(mark(step, 100 * step, 100 * step + 90, cat))
        events += [{**each, "ts": each["ts"] + 100 * step} for each in STEP]
    path = tmp_path / "rank0.pt.trace.json.gz"
    held = {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "traceEvents": events,
    }
    path.write_bytes(gzip.compress(json.dumps(held).encode()))
    return read_log(path)


@pytest.mark.parametrize("cat", ["gpu_user_annotation", "user_annotation"])
def test_a_trace_splits_each_step_of_the_device(tmp_path, cat):
    found = trace(tmp_path, 3, cat=cat)
    assert found.said == {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 8}
    assert found.readings == pytest.approx((100e-6, 100e-6))
    parts = found.parts
    assert parts is not None
    assert parts.kernels_s == pytest.approx(52e-6)
    assert parts.collectives_s == pytest.approx(23e-6)
    assert parts.waits_s == pytest.approx(5e-6)
    assert parts.host_s == pytest.approx(20e-6)
    assert parts.step_s == pytest.approx(100e-6)
    assert parts.by_kernel_s == pytest.approx(
        {"products": 40e-6, "attention": 10e-6, "other": 2e-6}
    )
    assert parts.by_collective_s == pytest.approx(
        {"all_reduce": 20e-6, "all_gather": 10e-6, "send_recv": 15e-6}
    )


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ('{"traceEvents": [', "is no whole trace"),
        ('{"traceEvents": {}}', "has no list traceEvents"),
        ('{"traceEvents": []}', "has no steps"),
        (json.dumps({"traceEvents": [mark(0, 0, 9)]}), "has no kernels of a GPU"),
    ],
)
def test_a_broken_trace_is_told_in_a_line(tmp_path, held, told):
    with pytest.raises(PlannerError, match=told):
        read(tmp_path, held, "trace.json")


def test_warm_up_and_checkpoints_do_not_count():
    found = steady_of([9.0, 1.5, *[1.0, 1.02, 0.98] * 6, 4.0])
    assert (found.warm_up, found.outliers, found.used) == (2, 1, 18)
    assert found.seconds == pytest.approx(1.0)
    assert 0 < found.standard_error < 0.02


def test_a_single_reading_is_all_there_is():
    assert steady_of([2.0]).seconds == 2.0
    assert steady_of([9.0, 2.0]).seconds == 2.0


def test_what_is_no_log_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("it trained well")
    assert find_log(path) is None
    with pytest.raises(PlannerError, match="is no log that is known; give one of torch"):
        read_log(path)
    with pytest.raises(PlannerError, match="can't be read"):
        read_log(tmp_path / "absent.log")
    (tmp_path / "broken.json.gz").write_bytes(b"no gzip")
    with pytest.raises(PlannerError, match="can't be read"):
        read_log(tmp_path / "broken.json.gz")
    stopped = read(tmp_path, "iteration 1 | elapsed time per iteration (ms): 0.0 |")
    with pytest.raises(PlannerError, match="no step that took time"):
        stopped.steady(lambda seconds: seconds)
