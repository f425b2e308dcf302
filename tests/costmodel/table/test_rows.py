"""Rows in, predictions out: devices, what fits, files of spreadsheets."""

import csv
import time

import pytest

from costmodel.table.kernels import FOUR_BITS, load_rates
from costmodel.table.rows import rows
from costmodel.table.rows.devices import device_of, is_scaled, scaled_rates
from costmodel.table.rows.row_files import read_rows
from costmodel.table.rows.rows import estimate_file, estimate_rows, machine_of, predict_row
from planner.errors import PlannerError
from profiles import load_profile
from tests.costmodel.table.rows_of_runs import ROW


def test_an_open_microbatch_is_one_that_fits():
    """Of FSDP all samples of a rank go at once, if they fit; the microbatch is then said."""
    row = {**ROW, "stack": "FSDP", "gpus": "8", "model": "llama2-7b", "seq_len": "4096", "tp": "1",
           "pp": "1", "dp": "8", "global_batch": "256", "micro_batch": "", "zero_stage": "3",
           "recompute": "none"}  # fmt: skip
    sizes = ("layers", "hidden", "heads", "ffn_hidden", "gated_ffn", "vocab")
    (line,) = estimate_rows([{**row, **dict.fromkeys(sizes, "")}])
    assert "micro_batch=2;" in line["assumed"]
    assert line["predicted_fits"] == "yes"
    assert line["predicted_peak_mem_gib"] < 80


def test_a_row_that_breaks_the_estimate_costs_no_other(monkeypatch):
    """D18: a mistake of ours shows in its row; the rows beside it are predicted."""
    whole = rows.run_of

    def breaks(row, *given):
        return whole(row, *given) if row["layers"] == ROW["layers"] else 1 / 0

    monkeypatch.setattr(rows, "run_of", breaks)
    broken, sound = estimate_rows([{**ROW, "layers": "7"}, ROW])
    assert broken["reason"] == "its numbers cannot be priced (division by zero)"
    assert (sound["reason"], sound["predicted_fits"]) == ("", "yes")


@pytest.mark.parametrize("notes", ["0 Gb/s between nodes", ". Gb/s between nodes", None])
def test_notes_that_state_no_rate(notes):
    assert predict_row({**ROW, "notes": notes}) == predict_row(ROW)


@pytest.mark.parametrize(
    ("gpu", "memory_gb", "name"),
    [
        ("A100-SXM4-80GB", "", "A100 SXM"),
        ("A100-SXM", "40.0", "A100 SXM 40GB"),
        ("NVIDIA A100-PCIe 40GB", "", "A100 PCIe 40GB"),
        ("h100 80gb hbm3", "", "H100 SXM"),
        ("H100-SXM (96GB HBM2e, 500W)", "96", "H100 with HBM2e"),
        ("H200-SXM", "141", "H200"),
        ("NVIDIA H20", "", "H20"),
        ("GB200 NVL72", "186", "GB200 NVL72"),
        ("L40S", "", "L40S"),
        ("AMD Instinct MI250X", "", "MI250X, one die"),
        ("Intel Gaudi 2", "", "Gaudi 2"),
        ("TPU v5p", "", "TPU v5p"),
        ("A100-SXM", "81920", "A100 SXM"),
    ],
)
def test_names_of_devices(gpu, memory_gb, name):
    """A device without a profile is priced by its reference device, and the row says so."""
    device = device_of(gpu, float(memory_gb) if memory_gb else None)
    assert device.name == name
    (line,) = estimate_rows([{**ROW, "gpu": gpu, "gpu_mem_gb": memory_gb, "dtype": "bf16"}])
    assert line["reason"] == ""
    assert (f"scaled to {name}" in line["assumed"]) == is_scaled(device)


def test_less_bandwidth_is_slower():
    """A device's own data sheet counts, not only its reference device's rates."""
    seconds = [
        predict_row({**ROW, "gpu": gpu})["predicted_step_time_s"]
        for gpu in ("A100-SXM 80GB", "A100-SXM 40GB", "V100-SXM2")
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1]


def test_dtypes_a_device_lacks_are_widened():
    wide = predict_row({**ROW, "dtype": "bf16"})
    narrow = predict_row({**ROW, "dtype": "fp8"})
    assert narrow["predicted_step_time_s"] == wide["predicted_step_time_s"]
    assert "dtype=bfloat16: NVIDIA A100-SXM4-80GB has no float8" in narrow["assumed"]


def test_a_run_too_large_is_said_not_to_fit():
    """M11: the memory programs see, less the context, and what the allocator wastes."""
    large = {**ROW, "layers": "96", "hidden": "8192", "heads": "64", "ffn_hidden": "32768"}
    assert predict_row(ROW)["predicted_fits"] == "yes"
    assert predict_row(large)["predicted_fits"] == "no"


def test_what_a_row_leaves_open_may_make_it_fit():
    """M11: recompute is blank in many published tables."""
    row = {**ROW, "stack": "megatron-te", "gpu": "H100", "hidden": "8192", "heads": "64",
           "ffn_hidden": "32768", "tp": "4", "pp": "2", "dp": "1", "seq_len": "8192"}  # fmt: skip
    again = {**row, "layers": "24", "recompute": ""}
    assert predict_row(again)["predicted_fits"] == "yes, with full recompute"
    assert predict_row({**again, "recompute": "none"})["predicted_fits"] == "no"


def test_a_file_of_rows(tmp_path):
    """Rows of one model take some hundredths of a second each, one core."""
    source, target = tmp_path / "rows.csv", tmp_path / "predicted.csv"
    runs = [{**ROW, "global_batch": str(4 * (i % 50 + 1))} for i in range(100)]
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows(runs)
    start = time.process_time()
    assert estimate_file(source, target) == (100, 100)
    assert time.process_time() - start < 10
    predicted = read_rows(target)
    assert len(predicted) == 100
    assert all(float(row["predicted_step_time_s"]) > 0 for row in predicted)
    assert all(float(row["predicted_peak_mem_gib"]) > 0 for row in predicted)


@pytest.mark.parametrize(
    "write",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.replace("24", "24\0").encode("latin-1"),
        lambda text: text.replace(",", ";").encode(),
        lambda text: text.replace(",", " ,\t").upper().encode(),
        lambda text: ("\n\n" + text.replace("\n", ",of no column\n", 2)).encode(),
        lambda text: text.replace("layers", "layers,Layers", 1).replace("24", "24,x", 1).encode(),
    ],
    ids=["bom", "crlf", "utf16", "nul", "semicolons", "spaces", "ragged", "twice"],
)
def test_files_of_spreadsheets(tmp_path, write):
    """D18: whatever a table was saved with, its rows are predicted as they are."""
    source, target = tmp_path / "rows.csv", tmp_path / "predicted.csv"
    source.write_bytes(write(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n"))
    assert estimate_file(source, target) == (1, 1)
    (row,) = read_rows(target)
    assert float(row["predicted_step_time_s"]) == predict_row(ROW)["predicted_step_time_s"]


def test_foreign_files_are_one_line(tmp_path):
    with pytest.raises(PlannerError, match="no file"):
        read_rows(tmp_path / "none.csv")
    for text in ("", "a,b\n1,2\n"):
        (tmp_path / "odd.csv").write_text(text)
        with pytest.raises(PlannerError, match="lacks column gpu"):
            read_rows(tmp_path / "odd.csv")


@pytest.mark.parametrize(
    ("layout", "fits"),
    [
        ({"dp": "2", "micro_batch": "1", "zero_stage": "0"}, "yes"),
        ({"dp": "4", "micro_batch": "2", "zero_stage": "1"}, "nearly full"),
    ],
)
def test_allocators_reserve_more_where_collectives_take_their_blocks(layout, fits):
    """Two runs of nanotron's benchmark. The first reserved 65.9 GiB, of which 63.1 were live, and
    took 9.93 s; with ZeRO 1 a run of 75.5 live took 40 s where its work takes 5.
    """
    row = {**ROW, "stack": "nanotron", "gpu": "H100-SXM", "layers": "32", "hidden": "4096",
           "heads": "32", "ffn_hidden": "14336", "gated_ffn": "1", "vocab": "131072",
           "seq_len": "4096", "global_batch": "256", "tp": "1", "pp": "8", "vpp": "1",
           "schedule": "1f1b", "recompute": "none", "gpus": str(8 * int(layout["dp"]))}  # fmt: skip
    found = predict_row({**row, **layout})
    assert found["predicted_fits"] == fits
    expected_s = {"yes": 9.93, "nearly full": 40.35}[fits]
    assert found["predicted_step_time_s"] == pytest.approx(expected_s, rel=0.15)


def test_products_in_8_bits_of_mi300x_are_slower_beside_the_h100s_than_those_in_16():
    """620 to 718 TFLOP/s in 16 bits, 990 to 1280 in 8."""
    device = device_of("MI300X")
    rates = load_rates(load_profile(device.reference))
    peaks = scaled_rates(device, rates, reference_link_bytes_per_s=450e9).peak_flop_per_s
    wide, narrow = "bfloat16", "float8_e4m3fn"
    assert peaks[wide] / rates.peak_flop_per_s[wide] == pytest.approx(620 / 718, rel=0.01)
    assert peaks[narrow] / rates.peak_flop_per_s[narrow] == pytest.approx(990 / 1280, rel=0.01)


def test_blackwell_ultra_multiplies_in_4_bits_three_times_as_fast_as_in_8():
    """HGX B300: 108 PFLOP/s in NVFP4 without sparsity and 36 in FP8; HGX B200: twice as fast."""
    for gpu, times in (("GB300", 3), ("B300", 3), ("GB200", 2), ("B200", 2)):
        _, rates, _ = machine_of({"gpu": gpu})
        peaks = rates.peak_flop_per_s
        assert peaks[FOUR_BITS] == pytest.approx(times * peaks["float8_e4m3fn"])
