"""Which model families plan, and train as one process does: tiny random models of every name.

For each name of transformers' mappings a tiny configuration is made from the family's own by
shrinking its sizes, and written as a model file such as a user has. A family that trains in one
process is then searched and verified, at tp 2 x pp 2 and at dp 2, by the commands as a user
types them. What a command refuses in one line is told apart from what fails.

    python benchmarks/families.py --keep DIR [--kind causal ...] [--only NAME ...] [--again]
                                  [--write docs/families.md]

Results are kept in DIR, beside the model files, and not made again without --again.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
for thread_count in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[thread_count] = "1"

LIMIT_S = 180
"""A command may take so many CPU seconds, of all its processes. On an undisturbed machine its time
by the clock is no more; on a shared one only CPU seconds say what the command itself takes."""

HANGS_S = 900
"""After so many seconds by the clock a command is ended whatever it has computed: it may hang."""

IMPORTED = (
    *("torch", "torch._dynamo", "torch.export", "torch.distributed", "torch.testing"),
    *("transformers.modeling_utils", "transformers.generation", "transformers.masking_utils"),
    *("transformers.models.llama.modeling_llama", "cli", "planner.runtime.start.worker"),
    *("planner.capture", "planner.runtime.check.verify", "search", "costmodel"),
)
"""Imported before processes fork, so that each need not."""

LAYOUTS = {"tp2-pp2": ("--gpus=4", "--tp=2", "--pp=2"), "dp2": ("--gpus=2", "--dp=2")}

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}

SEQUENCE, VOCABULARY, IMAGE = 16, 64, 32

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "input_size", "hidden_dim", "width", "word_embed_size"), 32),
    **dict.fromkeys(("embedding_dim", "attention_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("lru_width", "hidden_size_per_layer_input", "text_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size"), 64),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_hidden_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("rotary_dim", "attention_rotary_dim"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_transformer_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "global_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_num_heads", "index_n_heads", "qk_dim", "v_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "top_k_experts", "moe_num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("index_topk", "mamba_chunk_size", "chunk_size", "time_step_rank"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel"), 4),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "seq_length"), 64),
    **dict.fromkeys(("image_size", "img_size", "input_resolution"), IMAGE),
    **dict.fromkeys(("patch_size", "out_hidden_size"), 8),
    **dict.fromkeys(("sliding_window", "attention_window", "window"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
}
"""Sizes of tiny models, by what configurations call them; others stay as they are."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
_GEMMA3N = {  # the last layers take keys of layers before them: so each kind is there twice
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
OWN: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA_HEADS | {"attn_layer_indices": [1]},
    "gemma3n_text": _GEMMA3N,
    "gemma3n": {"text_config": _GEMMA3N},
    "falcon_h1": _MAMBA_HEADS | {"mamba_d_ssm": 64},
    "granitemoehybrid": _MAMBA_HEADS,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
}
"""What single families need beside, by name."""

FILE = '''"""A tiny {architecture} with random weights, as benchmarks/families.py makes it."""

from math import inf, nan  # noqa: F401  (configurations have them)

import torch
from transformers import {architecture}, {config}

CONFIG = {values}


def model():
    torch.manual_seed(0)
    return {architecture}({config}.from_dict(CONFIG))


def batch(size):
{batch}
'''

TEXT = """    ids = torch.randint(4, {vocabulary}, (size, {length}))
    return {{"input_ids": ids, "labels": ids}}"""
PICTURES = """    pictures = torch.randn(size, {channels}, {image}, {image})
    return {{"pixel_values": pictures, "labels": torch.randint(0, 2, (size,))}}"""
SOUND = """    sound = torch.randn(size, {shape})
    return {{"{name}": sound, "labels": torch.randint(4, 32, (size, 4))}}"""


@dataclass
class Result:
    """What became of a family. Mutable: filled while it is tried.

    Attributes:
        family: its name in the mapping.
        kind: of the mapping.
        architecture: its class.
        trains: whether it trains in one process; if not, `why` says why not.
        outcome: by layout: "works", "refused", "differs", "fails" or "late".
        cpu_s: by layout and command, CPU seconds of all its processes.
        why: by layout, the last line that was said.
    """

    family: str
    kind: str
    architecture: str
    trains: bool = False
    outcome: dict[str, str] = field(default_factory=dict)
    cpu_s: dict[str, dict[str, float]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> str:
        """The worst of its outcomes."""
        order = ("fails", "late", "differs", "refused", "works")
        return min(self.outcome.values(), key=order.index) if self.outcome else "-"


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values with tiny sizes, in parts as well.

    Of layers so many are kept that each kind is there, and what lists or tables say of them.
    """
    small = {}
    layers = next((n for k in LAYERS if isinstance(n := values.get(k), int)), 0)
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == layers > 2]
    kept = kinds_of_layers(lists, layers)
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("config") and "layer" not in name:
            value = shrunk(value)
        elif name in LAYERS and isinstance(value, int):
            value = len(kept)
        elif isinstance(value, list) and len(value) == layers > 2:
            value = [value[place] for place in kept]
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            by_layer = {int(key): each for key, each in value.items()}
            value = {
                place: by_layer[layer] for place, layer in enumerate(kept) if layer in by_layer
            }
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            value = min(value, SIZES[name]) if value > 0 else value
        elif name.endswith("token_id") and isinstance(value, int):
            value = min(value, len(name) % 3)
        small[name] = value
    if small.get("kv_lora_rank"):  # each head has a key of its own
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def kinds_of_layers(lists: list[list[Any]], layers: int) -> list[int]:
    """Return layers, two at least, of which each kind has its first."""
    first: dict[str, int] = {}
    for place in range(layers):
        first.setdefault(repr([each[place] for each in lists]), place)
    kept = sorted(first.values())[:6]
    return kept if len(kept) > 1 else [*kept, *range(len(kept), 2)]


def write_model_file(kind: str, family: str, folder: Path) -> tuple[Path, str]:
    """Write a family's model file; raise where it has no configuration of its own."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    architecture = getattr(modeling_auto, MAPPINGS[kind])[family]
    if isinstance(architecture, tuple | list):
        architecture = architecture[0]
    config_name = configuration_auto.CONFIG_MAPPING_NAMES[family]
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class or getattr(transformers, config_name)
    default = config_class()
    values = shrunk({k: v for k, v in default.to_dict().items() if k != "dtype"})
    values = merged(values, OWN.get(family, {}))
    if kind in ("causal", "masked", "multimodal", "seq2seq"):
        batch = TEXT.format(vocabulary=VOCABULARY, length=SEQUENCE)
    elif kind == "image":
        size = values.get("image_size", IMAGE)
        size = size if isinstance(size, int) else size[0]
        batch = PICTURES.format(channels=values.get("num_channels", 3), image=size)
    else:
        name = model_class.main_input_name
        shape = "2000" if name == "input_values" else f"{values.get('num_mel_bins', 80)}, 64"
        batch = SOUND.format(name=name, shape=shape)
    path = folder / f"{kind}_{family.replace('-', '_')}.py"
    path.write_text(
        FILE.format(
            architecture=architecture,
            config=config_class.__name__,
            values=json_of(values),
            batch=batch,
        )
    )
    return path, architecture


def merged(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return values with some replaced, those of parts one by one."""
    found = dict(values)
    for name, value in own.items():
        inner = found.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict)
        found[name] = merged(inner, value) if both else value
    return found


def json_of(values: dict[str, Any]) -> str:
    """Return values as Python text."""
    return repr(json.loads(json.dumps(values, default=lambda each: None)))


def session_cpu_s(session: int) -> float:
    """Return the CPU seconds of a session's processes, and of those that they have waited for."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # after the name, which may hold blanks: state, parent, group, session, ...
            numbers = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(numbers[3]) == session:
                ticks += sum(int(each) for each in numbers[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (124: too late), output and CPU seconds."""

    code: int
    said: str
    cpu_s: float


def in_fork(work: Callable[[], int]) -> Ended:
    """Run work in a process of its own, for LIMIT_S CPU seconds at most."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        os.dup2(write, 1)
        os.dup2(write, 2)
        code = 3
        try:
            code = work()
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    os.close(write)
    os.set_blocking(read, False)
    said, ends = io.BytesIO(), time.monotonic() + HANGS_S
    code, cpu_s = None, 0.0
    while code is None:
        with contextlib.suppress(BlockingIOError):
            said.write(os.read(read, 1 << 16))
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            cpu_s = max(cpu_s, used.ru_utime + used.ru_stime)
            break
        cpu_s = max(cpu_s, session_cpu_s(child))
        if cpu_s > LIMIT_S or time.monotonic() > ends:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = 124
        else:
            time.sleep(0.25)
    with contextlib.suppress(BlockingIOError):
        while more := os.read(read, 1 << 16):
            said.write(more)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.close(read)
    return Ended(code, said.getvalue().decode(errors="replace"), round(cpu_s, 1))


def train(path: Path) -> int:
    """Train two steps in one process."""
    import torch

    from planner.graph.model_file import load_model_file

    source = load_model_file(path)
    module = source.build().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for size in (2, 3):
        loss = module(**source.batch(size)).loss
        loss.backward()
        if not torch.isfinite(loss):
            print(f"the loss is {loss.item()}")
            return 1
        optimizer.step()
        optimizer.zero_grad()
    return 0


def command(arguments: list[str]) -> int:
    """Run a command of planner, as typed, but that its ranks are forks of this process."""
    import cli
    from planner.runtime.start import agent

    agent.run_agent = forked_ranks
    return cli.run(arguments)


@dataclass(frozen=True)
class Failed:
    """When a rank failed, and how."""

    timestamp: float
    exitcode: int


@dataclass(frozen=True)
class Ranks:
    """What became of ranks: those that failed."""

    failed: dict[int, Failed]

    def is_failed(self) -> bool:
        return bool(self.failed)


def forked_ranks(command: Sequence[str], *, course: Any, ranks_here: int, **_: Any) -> Ranks:
    """Run a command's ranks as forks: each would take 7 CPU seconds to import its libraries."""
    from planner.runtime.start import worker

    arguments = list(command[command.index(worker.__name__) + 1 :])
    with socket.socket() as port:
        port.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port.getsockname()[1])}
    ranks = {}
    for rank in range(ranks_here):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
            place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks_here)
            os.environ.update(meeting | {name: str(value) for name, value in place.items()})
            atexit._clear()  # the parent's folders are the parent's to delete
            worker.main(arguments)
            os._exit(3)
        ranks[child] = rank
    failed: dict[int, Failed] = {}
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child, None)
        if rank is not None and status:
            failed[rank] = Failed(time.time(), os.waitstatus_to_exitcode(status))
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    if failed:
        course.goes_on(failed)
    return Ranks(failed)


OUTCOMES = {0: "works", 1: "differs", 2: "refused", 124: "late"}


def try_family(kind: str, family: str, folder: Path, stop_at: str) -> Result:
    """Make a family's model, and plan and verify it, or stop before."""
    result = Result(family=family, kind=kind, architecture="")

    def make() -> int:
        path, architecture = write_model_file(kind, family, folder)
        print(f"made {path} {architecture}")
        return train(path)

    ended = in_fork(make)
    lines = ended.said.splitlines()
    made = next((line.split() for line in lines if line.startswith("made ")), None)
    result.trains = ended.code == 0
    if made is not None:
        result.architecture = made[2]
    if ended.code or made is None:
        result.why["one process"] = last_line(ended.said)
        return result
    if stop_at == "train":
        return result
    plan = folder / f"{kind}_{family}.json"
    for label, flags in LAYOUTS.items():
        asked = ["--profile=h100-sxm5-80gb", "--global-batch=8", f"--out={plan}", *flags]
        result.cpu_s[label] = {}
        for arguments in (["search", made[1], *asked], ["verify", str(plan), made[1]]):
            ended = in_fork(lambda arguments=arguments: command(arguments))
            result.cpu_s[label][arguments[0]] = ended.cpu_s
            said = folder / f"{kind}_{family}.{label}.{arguments[0]}.log"
            said.write_text(ended.said)
            if ended.code or stop_at == "search":
                break
        result.outcome[label] = OUTCOMES.get(ended.code, "fails")
        if "Traceback (most recent call last)" in ended.said:
            result.outcome[label] = "fails"
        if ended.code:
            result.why[label] = f"{arguments[0]}: {last_line(ended.said)}"
    return result


def last_line(said: str) -> str:
    """Return the line that says why, of what a command printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error", "planner", "Error"))]
    return (told or lines or ["nothing was said"])[-1][:400]


def families(kinds: list[str], only: list[str]) -> Iterator[tuple[str, str]]:
    """Yield kinds and names, in the order of those that were given."""
    from transformers.models.auto import modeling_auto

    for kind in kinds:
        names = getattr(modeling_auto, MAPPINGS[kind])
        yield from ((kind, family) for family in only or names if family in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, required=True, help="a folder for files and results")
    parser.add_argument("--kind", nargs="*", choices=MAPPINGS, default=list(MAPPINGS))
    parser.add_argument("--only", nargs="*", default=[], help="names of families")
    parser.add_argument("--again", action="store_true", help="also those with a result")
    parser.add_argument("--stop-at", choices=["train", "search", "verify"], default="verify")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()

    counts: Counter[str] = Counter()
    for kind, family in families(options.kind, options.only):
        kept = options.keep / f"{kind}_{family}.result"
        if kept.exists() and not options.again:
            result = Result(**json.loads(kept.read_text()))
        else:
            result = try_family(kind, family, options.keep, options.stop_at)
            kept.write_text(json.dumps(asdict(result)))
        whole = result.whole if result.trains else "does not train"
        counts[whole] += 1
        why = next(iter(result.why.values()), "")
        print(f"{kind:10} {family:28} {whole:15} {result.cpu_s} {why[:220]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
