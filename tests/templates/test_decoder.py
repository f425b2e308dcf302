"""The module of a template: its capture has the template's price, and its experts their sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from costmodel.estimate import estimate
from planner.capture.source.decoder import Decoder
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.templates import Adapters, Transformer, build_transformer
from profiles import load_profile
from tests.captures import capture_module
from tests.templates.written import EXPERTS, GPT, LATENT, LLAMA

MODELS = {
    "llama": LLAMA,
    "gpt": GPT,
    "normed heads": replace(LLAMA, query_key_norm=True),
    "tied": replace(LLAMA, tied=True),
    "latent": replace(LLAMA, latent=LATENT, kv_heads=4),
    "experts": replace(LLAMA, experts=replace(EXPERTS, shared=1, dense_layers=1)),
    "experts with biases": replace(LLAMA, bias=True, experts=replace(EXPERTS, bias=True)),
}


def batch(sizes: Transformer, samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(sizes.vocab, (samples, sizes.seq_len + 1))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


@pytest.mark.parametrize("name", MODELS)
def test_the_capture_of_the_module_costs_what_the_template_does(name: str) -> None:
    sizes = MODELS[name]
    module = Decoder(sizes)
    if sizes.experts is None:
        sizes = replace(sizes, dtype="float32")
    else:
        module = module.to(torch.bfloat16)  # in which torch's grouped product is captured
    capture = capture_module(module, batch(sizes, 2), batch(sizes, 3), name=name)
    template = build_transformer(sizes)
    assert capture.num_params() == template.num_params()
    assert [b.class_index for b in capture.blocks] == [b.class_index for b in template.blocks]
    profile = load_profile("h100-sxm5-80gb")
    found, said = (
        estimate(graph, profile, default_plan(graph, dp=4, zero_stage=1, num_microbatches=2))
        for graph in (capture, template)
    )
    assert found.flop == pytest.approx(said.flop, rel=0.02)
    assert found.peak_bytes == pytest.approx(said.peak_bytes, rel=0.1)


def test_tokens_ahead_are_a_second_loss() -> None:
    torch.manual_seed(0)
    sizes = replace(LLAMA, ahead=1)
    module, data = Decoder(sizes), batch(sizes, 2)
    whole = module(**data).detach()
    module.ahead = torch.nn.ModuleList()
    assert 1.5 < float(whole / module(**data).detach()) < 2.5


@pytest.mark.parametrize("bias", [False, True])
def test_experts_sum_what_each_of_them_makes_of_its_rows(bias: bool) -> None:
    torch.manual_seed(0)
    layer = Decoder(replace(LLAMA, experts=replace(EXPERTS, bias=bias)))
    layer = next(layer.layers).mlp
    first, second = torch.zeros(EXPERTS.number, 1), torch.zeros(EXPERTS.number, 1)
    if bias:
        first, second = (torch.nn.init.normal_(b.data) for b in (layer.fc1_bias, layer.fc2_bias))
    x = torch.randn(2, LLAMA.seq_len, LLAMA.hidden)
    rows = x.view(-1, LLAMA.hidden)
    weights, chosen = layer.router(rows).softmax(dim=-1).topk(EXPERTS.per_token)
    expected = torch.zeros_like(rows)
    for row in range(len(rows)):
        for weight, expert in zip(weights[row], chosen[row], strict=True):
            gate, up = (rows[row] @ layer.fc1[expert] + first[expert]).chunk(2)
            made = (torch.nn.functional.silu(gate) * up) @ layer.fc2[expert] + second[expert]
            expected[row] += weight * made
    torch.testing.assert_close(layer(x), expected.view(x.shape), rtol=1e-5, atol=1e-6)


def test_heads_that_are_written_out_are_those_of_the_kernel() -> None:
    torch.manual_seed(0)
    written = Decoder(replace(LLAMA, fused_attention=False))
    fused = Decoder(LLAMA)
    fused.load_state_dict(written.state_dict())
    data = batch(LLAMA, 2)
    torch.testing.assert_close(written(**data), fused(**data))


@pytest.mark.parametrize("changes", [{"code": "huggingface"}, {"adapters": Adapters(rank=2)}])
def test_what_no_module_is_written_for_is_told(changes: dict) -> None:
    with pytest.raises(PlannerError, match="code='modules' without adapters"):
        Decoder(replace(LLAMA, **changes))
