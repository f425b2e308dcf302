"""M25: what a rank holds of tables whose gradients are rows, by a dry run."""

from __future__ import annotations

from planner.language.lowering.defaults import default_plan
from planner.runtime.proofs.dryrun import dry_run
from tests.captures import capture_module
from tests.runtime.test_sparse_tables import Towers, batch


def test_a_sparse_table_has_no_gradient_of_its_shape():
    def rest_bytes(sparse: bool) -> int:
        def build() -> Towers:
            return Towers(sparse, rows=1000)

        graph = capture_module(build(), batch(2), batch(3), name="towers")
        plan = default_plan(graph, num_microbatches=2, microbatch_size=2)
        return dry_run(plan, graph, build).rest_bytes

    tables, samples, stand_ins = 2 * 1000 * 4 * 4, 2 * 2, 2 * 4
    rows = samples * (1 + 3 + 1) * (4 * 4 + 8)
    assert rest_bytes(True) == rest_bytes(False) - tables + rows + stand_ins
