"""N1: ordinary models have nothing named, but for what they are known for."""

from __future__ import annotations

import pytest

from planner.language.across import across_samples, blocks_across_samples
from planner.language.graph import ModelGraph
from tests.builders import telling_first, tiny_models
from tests.captures import capture_module, capture_tiny
from tests.model_matrix import REFUSED, model_matrix

COMPARING = {"hf-clip": "text_embeds, image_embeds.t()"}
"""Models whose loss compares samples, and what their line has."""

OWN_FUNCTIONS = {"hf-phimoe", "hf-bloom"}
"""Models with an autograd function, which nothing is known of."""

NORMED = {"batchnorm-mlp": 2, "batchnorm-resnet": 3, "hf-resnet": 6, "hf-segformer": 1}
"""Models with BatchNorm, which has a message of its own."""


@pytest.mark.parametrize("name", telling_first())
def test_tiny_models_compute_samples_alone(name: str):
    check(name, capture_tiny(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(model_matrix()) - set(tiny_models()) - set(REFUSED)))
def test_models_compute_samples_alone(name: str):
    pytest.importorskip("transformers")
    model = model_matrix()[name]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    check(name, graph)


def check(name: str, graph: ModelGraph) -> None:
    findings = across_samples(graph)
    if name in COMPARING:
        assert {finding.kind for finding in findings} == {"pairs"}
        assert COMPARING[name] in findings[0].line
        assert blocks_across_samples(graph) == {findings[0].block_index}
    elif name in OWN_FUNCTIONS:
        assert {finding.kind for finding in findings} == {"unknown"}
    else:
        assert findings == ()
        assert bool(blocks_across_samples(graph)) == (name in NORMED)
