"""A small transformer whose stages may recompute, for tests of how much they do."""

from __future__ import annotations

from planner.language.templates import Transformer, build_transformer
from search import SearchRequest
from search.candidates import Candidates
from search.space.configuration import Configuration
from search.stages.stage_table import StageTable
from tests.search.machine import Machine


def candidates_of(layers: int, **fixed: object) -> Candidates:
    """Return what searches of a model share that ask for a pipeline alone."""
    graph = build_transformer(
        Transformer(
            layers=layers, hidden=32, heads=4, kv_heads=2, ffn_hidden=96, vocab=100, seq_len=64
        )
    )
    return Candidates.of(graph, Machine(context_bytes=0.0), request_of(**fixed))


def request_of(**fixed: object) -> SearchRequest:
    settings = {
        "num_devices": 2, "pp": 2, "tp": 1, "dp": 1, "cp": 1, "zero": 0, "microbatch_size": 4,
        "global_batch": 16, "schedule": "1f1b", "offload": "none",
    }  # fmt: skip
    return SearchRequest(**settings | fixed)


def only_configuration(candidates: Candidates, **fixed: object) -> tuple[Configuration, StageTable]:
    """Return the configuration that a request leaves, and its first layout's table."""
    (shape,) = candidates.shapes(request_of(**fixed))
    (configuration,) = shape.configurations()
    return configuration, candidates.tables(shape.tp, shape.microbatch_size)[0]
