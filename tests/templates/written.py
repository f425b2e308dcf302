"""Small models of templates, and what their parts write, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

from planner.language.graph import Program
from planner.language.templates.tape import Tape
from planner.language.templates.transformer import Experts, Latent, Transformer

H, WIDE, SEQ, HEADS = 32, 96, 8, 4
LLAMA = Transformer(
    layers=2, hidden=H, heads=HEADS, kv_heads=2, ffn_hidden=WIDE, vocab=100, seq_len=SEQ
)
GPT = replace(
    LLAMA, kv_heads=HEADS, gated=False, norm="layer", positions="learned", bias=True, dropout=True
)
LATENT = Latent(query_rank=12, key_rank=10, rope_dim=4)
EXPERTS = Experts(number=6, per_token=2, width=24)


def written(write: Callable, *arguments, model: Transformer = LLAMA, **options) -> Program:
    tape = Tape("block", dtype=model.dtype)
    return tape.program(write(tape, *arguments, **options))


def num_params(program: Program) -> int:
    return sum(prod(program.tensor[name].shape_at(1)) for name in program.params)


def count(program: Program, target: str) -> int:
    return Counter(op.target.split(".")[1] for op in program.ops)[target]
