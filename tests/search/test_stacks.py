"""X11: a plan that is searched for a stack is written by its emitter, nothing pinned nor accepted."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from planner.emit import EMITTERS, PlanView, emit, find_emitter, refusals
from planner.emit.megatron_options import parse_flags
from planner.emit.megatron_rules import Run, broken_rules
from planner.emit.targets.megatron_lm import megatron_flags
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.plan import Plan
from planner.stacks import STACKS, Stack, expressed_of
from planner.templates import Experts, Transformer, build_transformer
from planner.units import GIB
from profiles import Profile, load_profile
from search import SearchRequest, SearchResult, find_plan

QUICK, SLOW = 3, 30
"""Random models and clusters for each stack."""


@cache
def h100() -> Profile:
    return load_profile("h100-sxm5-80gb")


def random_model(rng: random.Random) -> Transformer:
    """A small transformer: dense or of experts, of other people's code or of Megatron's."""
    heads = rng.choice([4, 8, 12])
    hidden = heads * rng.choice([32, 64])
    width = hidden * rng.choice([2, 3, 4])
    experts = Experts(number=4, per_token=2, width=width) if rng.random() < 0.3 else None
    return Transformer(
        layers=rng.choice([2, 3, 5, 8]),
        hidden=hidden,
        heads=heads,
        kv_heads=rng.choice([1, 2, 4, heads]) if heads != 12 else rng.choice([3, 12]),
        ffn_hidden=width,
        vocab=rng.choice([1000, 4096, 50257]),
        seq_len=rng.choice([256, 384, 1000]),
        gated=rng.random() < 0.7,
        tied=rng.random() < 0.3,
        positions=rng.choice(["rotary", "learned", "none"]),
        experts=experts,
        code=rng.choice(["modules", "huggingface"]),
    )


def random_graph(rng: random.Random) -> ModelGraph:
    while True:
        try:
            return build_transformer(random_model(rng))
        except ValueError:  # not every code has every part
            continue


def random_request(rng: random.Random, stack: Stack) -> SearchRequest:
    """A question of a few devices or many, of so little memory that something has to give."""
    devices = rng.choice([1, 2, 4, 8, 16])
    return SearchRequest(
        num_devices=devices,
        global_batch=devices * rng.choice([1, 2, 6]),
        execution=rng.choice(stack.executions),
        precision="bf16",
        **rng.choice([{}, {}, {"pp": 2}, {"tp": 2}, {"zero": 3}, {"cp": 2}, {"recompute": "full"}]),
    )
