"""What other runtimes save for a backward: fused kernels, gathered inputs, the logits of a loss."""

from dataclasses import replace
from functools import lru_cache

import pytest

from costmodel.cache import CostCache
from costmodel.execution import find_execution
from costmodel.execution.executed import ExecutedProfile
from costmodel.table.rates import load_rates
from planner.layout.axes import Degrees
from planner.templates import Transformer, build_transformer
from planner.templates.splits import tp_layouts
from profiles import load_profile

HIDDEN, WIDE, TOKENS, VOCAB = 64, 96, 32, 256
MODEL = Transformer(
    layers=1, hidden=HIDDEN, heads=4, kv_heads=4, ffn_hidden=WIDE, vocab=VOCAB, seq_len=TOKENS
)  # fmt: skip
BASE = replace(find_execution("megatron-core"), fused_saves=False, regathers=False, loss_bytes=14)


@lru_cache
def costs_of(**said: bool | int) -> CostCache:
    profile = load_profile("h100-sxm5-80gb")
    rates, execution = load_rates(profile), replace(BASE, **said)
    executed = ExecutedProfile(profile, rates, num_nodes=1, execution=execution)
    return CostCache(build_transformer(MODEL), executed, execution=execution)


def kept(of_class: int, *, tp: int = 1, **said: bool | int) -> int:
    """Bytes that a block of one sample keeps for its backward."""
    layouts = (tp_layouts(MODEL, sequence_parallel=True)[of_class],) if tp > 1 else ()
    costs, degrees = costs_of(**said), Degrees(tp=tp)
    return costs.block_bytes(of_class, 1, degrees, layouts).kept_bytes


def test_a_fused_gated_activation_saves_what_it_takes() -> None:
    """Not the silu of the gate, which the product with it would need: 2 bytes an element."""
    assert kept(1) - kept(1, fused_saves=True) == 2 * TOKENS * WIDE


def test_gathered_inputs_of_products_are_saved_as_parts() -> None:
    """Of attention's and of the feed-forward's first product, on 2 ranks half of each. The part
    is the norm's result, which nothing else keeps.
    """
    assert kept(1, tp=2) - kept(1, tp=2, regathers=True) == 2 * TOKENS * HIDDEN * 2 // 2
    assert kept(1) == kept(1, regathers=True)


@pytest.mark.parametrize("bytes_per_logit", [6, 12, 14])
def test_a_loss_takes_as_many_bytes_of_a_logit_as_its_record_says(bytes_per_logit: int) -> None:
    costs = costs_of(loss_bytes=bytes_per_logit)
    layouts = (tp_layouts(MODEL, sequence_parallel=True)[2],)
    rise = costs.block_bytes(2, 1, Degrees(tp=2), layouts).forward_rise_bytes
    logits = TOKENS * VOCAB // 2
    # Beside them the norm's result, gathered and in parts, and a few bytes of each token.
    assert rise / logits == pytest.approx(bytes_per_logit, abs=3 * 2 * HIDDEN / (VOCAB // 2))
    least = costs_of(loss_bytes=6).block_bytes(2, 1, Degrees(tp=2), layouts).forward_rise_bytes
    assert rise - least == (bytes_per_logit - 6) * logits


def test_copied_values_are_saved_without_what_they_were_made_with() -> None:
    """Of queries, keys and values of one product, as wide each, only values are left."""
    assert kept(1) - kept(1, copies_values=True) == 2 * TOKENS * 2 * HIDDEN


def test_our_own_runtime_saves_what_autograd_does() -> None:
    """Its record is not read: the profile's prices are for the program as it runs."""
    profile = load_profile("h100-sxm5-80gb")
    own = CostCache(build_transformer(MODEL), profile).block_bytes(1, 1).kept_bytes
    assert own == kept(1)
