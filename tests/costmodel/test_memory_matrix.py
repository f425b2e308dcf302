"""The memory model against the dry run over models and layouts: `benchmarks.memory` as a test."""

import pytest

from benchmarks.machine.memory import rows_of
from tests.builders import tiny_models

LAYOUTS = (
    "one", "full", "selective", "tp2", "pp2", "pp2-fthenb-full", "pp2-vpp2", "pp2-fold",
    "pp2-zb_h1", "pp2-zb_h1-selective", "pp2-dualpipe_v", "dp2-zero1", "dp2-zero2", "dp2-zero3",
    "tp2-full", "tp2-pp2", "dp2-tp2-zero3", "dp2-then-tp2-zero3", "bf16-pp2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_models())
def test_every_pp_rank_of_every_layout(name):
    """X10: tensors within 1% of what the real engine holds on fake tensors."""
    if name.startswith("hf-"):
        pytest.importorskip("transformers")
    rows = list(rows_of(name, LAYOUTS, every_rank=False))
    assert len(rows) >= 5
    far = {(row.layout, row.rank): f"{row.error:+.2%}" for row in rows if abs(row.error) > 0.01}
    assert not far
