"""A torchtitan configuration in toml (up to its release v0.2.2): a model by flavor, and the run.

Source of the defaults: pytorch/torchtitan v0.2.2 (73a0e6979dd1), torchtitan/config/job_config.py.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands.doors.decoder_file import decoder_file
from commands.doors.opened import Asked, Opened, name_of, parsed, refuse_other_length, refuse_task
from commands.doors.torchtitan_flavors import FLAVORS, sizes_of
from planner.emit.targets.torchtitan import TOML_LINEAR
from planner.errors import ModelError
from planner.language.templates import Transformer

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"name": "llama3", "flavor": "debugmodel", "converters": []},
    "training": {
        "local_batch_size": 8,
        "global_batch_size": -1,
        "seq_len": 2048,
        "max_norm": 1.0,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "pipeline_parallel_microbatch_size": 1,
        "fsdp_reshard_after_forward": "default",
    },
    "activation_checkpoint": {"mode": "selective"},
    "compile": {"enable": False},
    TOML_LINEAR: {"recipe_name": ""},
}
"""What torchtitan has where a file says nothing, of the settings that are read."""

RECIPES = {
    "": ("fp8-tensorwise", "fp8"),
    "tensorwise": ("fp8-tensorwise", "fp8"),
    "rowwise": ("fp8", "fp8 rowwise"),
    "rowwise_with_gw_hp": ("", "fp8 rowwise_with_gw_hp"),
}
"""By torchao's recipe of linear layers in 8 bits, the precision of plans that has the same products
(empty: none) and the words of rows of runs."""


def read(path: Path, asked: Asked) -> Opened:
    """Return the model and the run of a configuration.

    Raises ModelError, in one line, for a file that is no such configuration, and for models and
    flavors whose sizes are not known.
    """
    refuse_task(path, asked)
    run = run_of(path, asked)
    if not run.trained["precision"]:
        raise ModelError(
            f"{path} multiplies as {run.dtype}, which no plan does; have recipe_name rowwise or "
            f"tensorwise in [{TOML_LINEAR}] and no other converter, or take converters out of "
            "[model]"
        )
    execution = run.trained["execution"]
    return Opened(
        name=name_of(run.flavor, "torchtitan"),
        code=decoder_file(f"torchtitan's {run.flavor}", run.sizes),
        trained=run.trained,
        layout=run.layout,
        notes=(
            f"{path}: {run.flavor}, sequences of {run.sizes.seq_len}, for {execution}; how it is "
            "laid out is searched (--keep-layout: as the file has it)",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanRun:
    """What a configuration says of a run."""

    flavor: str
    """The model's name and flavor."""
    sizes: Transformer
    """Its sizes."""
    trained: dict[str, Any]
    """What is trained, as options of `search`."""
    layout: dict[str, Any]
    """How its own run lays the work out, as options of `search`."""
    micro_batch: int
    """Samples that a replica takes at once."""
    recompute: str
    """none, selective or full."""
    dtype: str
    """What its products are in, as rows of runs say it."""


def run_of(path: Path, asked: Asked) -> TitanRun:
    """Return what a configuration says of a run; raises ModelError as `read` does."""
    said = _settings(path)
    training, model = said["training"], said["model"]
    name, flavor = model["name"], model["flavor"]
    length = _number(path, "training", "seq_len", training["seq_len"])
    refuse_other_length(path, asked, length)
    sizes = sizes_of(name, flavor, length)
    if sizes is None:
        known = ", ".join(FLAVORS.get(name, FLAVORS))
        what = f"flavor {flavor!r} of {name}" if name in FLAVORS else f"model {name!r}"
        raise ModelError(
            f"{path} has {what}, whose sizes are not known here; known are {known}: write a .py "
            "file with model() and batch(size)"
        )
    execution = "torchtitan-compiled" if said["compile"]["enable"] else "torchtitan"
    layout = _layout(path, said)
    local = _number(path, "training", "local_batch_size", training["local_batch_size"])
    precision, dtype = _multiplied(path, said)
    return TitanRun(
        flavor=f"{name} {flavor}",
        sizes=sizes,
        trained={"precision": precision, **_trained(path, said, asked.gpus, execution)},
        layout=layout,
        # A pipeline takes its batch in microbatches of a size of their own.
        micro_batch=local
        if layout["pp"] == 1
        else _number(
            path,
            "parallelism",
            "pipeline_parallel_microbatch_size",
            said["parallelism"]["pipeline_parallel_microbatch_size"],
        ),
        recompute=said["activation_checkpoint"]["mode"],
        dtype=dtype,
    )


def _settings(path: Path) -> dict[str, dict[str, Any]]:
    said = parsed(path, tomllib.loads, "toml", "a torchtitan configuration")
    if not isinstance(said.get("model"), dict) or "flavor" not in said["model"]:
        raise ModelError(
            f"{path} has no flavor in a [model] section; give a torchtitan configuration (a "
            "cluster file goes to --cluster)"
        )
    found = {}
    for section, usual in DEFAULTS.items():
        own: Any = said
        for part in section.split("."):  # [quantize.linear.float8] is a table in tables
            own = own.get(part, {}) if isinstance(own, dict) else own
        if not isinstance(own, dict):
            raise ModelError(f"{path} has {section} = {own!r}; it must be a section [{section}]")
        for name, value in own.items():
            if name in usual:
                _check_kind(path, section, name, value, usual[name])
        found[section] = usual | own
    return found


def _check_kind(path: Path, section: str, name: str, value: Any, usual: Any) -> None:
    """Raise ModelError for a value of another kind than what torchtitan has by default."""
    kinds = (int, float) if isinstance(usual, float) else (type(usual),)
    is_number = isinstance(usual, int | float) and not isinstance(usual, bool)
    if not isinstance(value, kinds) or (is_number and isinstance(value, bool)) or value != value:
        raise ModelError(
            f"{path} has {name} = {value!r} in [{section}]; it takes a value like {usual!r}"
        )


def _number(path: Path, section: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{path} has {name} = {value!r} in [{section}]; it takes 1 or more")
    return value


def _trained(
    path: Path, said: dict[str, dict[str, Any]], gpus: int | None, execution: str
) -> dict[str, Any]:
    training = said["training"]
    found: dict[str, Any] = {
        "clip_gradients": training["max_norm"] > 0,
        "execution": execution,
    }
    batch = training["global_batch_size"]
    if batch > 0:
        found["global_batch"] = batch
    elif gpus:
        # As many samples as its own replicas take at once.
        layout = _layout(path, said)
        replicas = max(1, gpus // (layout["tp"] * layout["cp"] * layout["pp"]))
        local = _number(path, "training", "local_batch_size", training["local_batch_size"])
        found["global_batch"] = local * replicas
    return found


def _multiplied(path: Path, said: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Return the precision of plans that multiply as a configuration says, and the words of rows;
    an empty precision where no plan does.
    """
    training, converters = said["training"], said["model"]["converters"]
    if TOML_LINEAR in converters:
        recipe = said[TOML_LINEAR]["recipe_name"]
        if recipe not in RECIPES:
            raise ModelError(
                f"{path} has recipe_name = {recipe!r} in [{TOML_LINEAR}]; it takes "
                f"{', '.join(filter(None, RECIPES))}"
            )
        precision, dtype = RECIPES[recipe]
        return (precision if len(converters) == 1 else "", dtype)
    if any("mx" in str(name) for name in converters):
        return "", "mxfp8"
    is_half = "bfloat16" in (training["dtype"], training["mixed_precision_param"])
    return ("bf16", "bf16") if is_half else ("model", "fp32")


def _layout(path: Path, said: dict[str, dict[str, Any]]) -> dict[str, Any]:
    axes = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
    found: dict[str, Any] = {
        axis: _number(
            path, "parallelism", f"{word}_parallel_degree",
            said["parallelism"][f"{word}_parallel_degree"],
        )
        for axis, word in axes.items()
    }  # fmt: skip
    shards = said["parallelism"]["data_parallel_shard_degree"]
    reshards = said["parallelism"]["fsdp_reshard_after_forward"]
    # Parameters are freed behind a forward except in pipelines, unless the file says.
    keeps = reshards == "never" or (reshards == "default" and found["pp"] > 1)
    found["zero"] = 0 if shards == 1 else 2 if keeps else 3
    mode = said["activation_checkpoint"]["mode"]
    # What is recomputed of a layer is searched: its selections are other ops than these here.
    return found | ({"recompute": mode} if mode in ("none", "full") else {})
