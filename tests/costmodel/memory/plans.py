"""A plan of the tiny GPT, for tests that need no more of it than its degrees."""

from planner.language.lowering.defaults import default_plan
from tests.builders import tiny_models
from tests.captures import capture_module


def gpt_graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


def plan_of(graph=None, **degrees):
    return default_plan(graph or gpt_graph(), **{"microbatch_size": 4, **degrees})
