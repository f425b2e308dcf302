"""All that a rank holds takes first values: stages, buffers, and what lies in no stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.runtime.initial.places import take_first_values
from tests.builders import tiny_models
from tests.captures import capture_tiny


class Filled:
    """First values that are all 7; `names` are those that were told."""

    def fill(self, places, names: Iterable[str]) -> None:
        self.names = list(names)
        for name in self.names:
            for place in places.get(name, ()):
                place.tensor.fill_(7)


def test_each_tensor_of_the_state_dict_is_given_its_value_once():
    model = tiny_models()["batchnorm-mlp"].build()
    engine = planner.apply(default_plan(capture_tiny("batchnorm-mlp"), num_microbatches=1), model)
    values = Filled()
    take_first_values(engine.state, values)
    assert len(values.names) == len(set(values.names))
    state = engine.full_state_dict()
    assert state.keys() <= set(values.names)
    assert all(torch.all(tensor == 7) for tensor in state.values())
    engine.close()
