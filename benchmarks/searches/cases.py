"""Models by their sizes, and what is asked of a search: captured once, and kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.plan import Plan
from planner.language.plan.parts import Precision


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model by its sizes (Llama's, or GPT-2's where kv_heads is 0), and what is asked."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    gpus: int
    global_batch: int
    goal_s: float
    memory_limit_gib: float | None = None


TINY = "2-layer@8"
"""The smallest case, for quick runs."""

CASES = {
    TINY: Case(
        layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, vocab=1024, seq_len=128,
        gpus=8, global_batch=64, goal_s=0.5,
    ),
    "llama3-8b@8": Case(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, seq_len=4096,
        gpus=8, global_batch=64, goal_s=0.6,
    ),
    "llama3-70b@64": Case(
        layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, seq_len=8192,
        gpus=64, global_batch=512, goal_s=2.0,
    ),
    "gpt3-175b@1024": Case(
        layers=96, hidden=12288, ffn=49152, heads=96, kv_heads=0, vocab=51200, seq_len=2048,
        gpus=1024, global_batch=1536, goal_s=2.0,
    ),
    "llama3-405b@16384": Case(
        layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8, vocab=128256, seq_len=8192,
        gpus=16384, global_batch=2048, goal_s=1.0,
    ),
    "1000-layer@512": Case(
        layers=1000, hidden=1024, ffn=4096, heads=16, kv_heads=16, vocab=32000, seq_len=1024,
        gpus=512, global_batch=1024, goal_s=3.0,
    ),
}  # fmt: skip


def capture(case: Case, precision: Precision = "model"):
    """Return the case's graph, captured on the meta device; its parameters are in bfloat16 where
    the precision is the model's own, else as that says.
    """
    import torch
    import transformers

    from planner.capture import capture_module

    if case.kv_heads:
        config = transformers.LlamaConfig(
            vocab_size=case.vocab,
            hidden_size=case.hidden,
            intermediate_size=case.ffn,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            max_position_embeddings=case.seq_len,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=case.vocab,
            n_embd=case.hidden,
            n_inner=case.ffn,
            n_layer=case.layers,
            n_head=case.heads,
            n_positions=case.seq_len,
        )
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    if precision == "model":
        module = module.to(torch.bfloat16)

    def batch(size: int) -> dict:
        ids = torch.zeros(size, case.seq_len, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    name = f"{case.layers}x{case.hidden}"
    return capture_module(module, batch(2), batch(3), name=name, precision=precision)


def cached_graph(name: str, case: Case, precision: Precision = "model"):
    """Return the graph, from the cache folder when it was captured before."""
    asked = ("gpus", "global_batch", "goal_s")
    model = asdict(replace(case, memory_limit_gib=None))
    sizes = {name: value for name, value in model.items() if name not in asked}
    digest = sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:16]
    name = digest if precision == "model" else f"{digest}-{precision}"
    return kept_graph(name, lambda: capture(case, precision))


def kept_graph(name: str, make: Callable[[], ModelGraph]) -> ModelGraph:
    """Return the graph of that name, from the cache folder when it was made before."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = root / "planner" / "benchmarks" / f"{name}.json"
    if path.exists():
        return from_json(json.loads(path.read_text()))
    graph = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(to_json(graph)))
    os.replace(scratch, path)
    return graph


def label(plan: Plan) -> str:
    """Return a plan's degrees and choices in a line."""
    recompute = "/".join(sorted(set(plan.recompute_by_block)))
    return (
        f"dp{plan.dp} cp{plan.cp} tp{plan.tp} pp{plan.pp} vpp{plan.vpp} "
        f"mbs{plan.microbatch_size}x{plan.num_microbatches} {plan.schedule} "
        f"zero{plan.zero_stage} {recompute}"
    )


def peak_rss_mib() -> int:
    """Return the most memory that this program held.

    Not `ru_maxrss`, which begins with what the parent held: that has captured models.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024
