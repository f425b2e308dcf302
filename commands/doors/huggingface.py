"""A Hugging Face config.json: the library's own class, on random tokens or pictures.

The class is the one that `architectures` names, or the family's for a task. Nothing is downloaded:
weights are random, and code that a configuration fetches (`auto_map`) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

from commands.doors.opened import Asked, Opened, name_of, parsed
from planner.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a model is trained for, and what its batches hold."""

    mapping: str
    """The library's table of classes for the task, by family."""
    inputs: Mapping[str, str]
    """The batch: by name, an expression of `size`, `length` and the names of a model file."""
    has_length: bool
    """Whether a sample is a sequence of tokens."""


_IDS = "torch.randint(VOCABULARY, (size, length))"
_CLASSES = "torch.randint(CLASSES, (size,))"
TASKS = {
    "causal-lm": Task(
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        inputs={"input_ids": _IDS, "labels": _IDS},
        has_length=True,
    ),
    "masked-lm": Task(
        mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        inputs={"input_ids": _IDS, "labels": _IDS},
        has_length=True,
    ),
    "seq2seq-lm": Task(
        mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        inputs={"input_ids": _IDS, "labels": _IDS},
        has_length=True,
    ),
    "text-classification": Task(
        mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        inputs={"input_ids": _IDS, "labels": _CLASSES},
        has_length=True,
    ),
    "token-classification": Task(
        mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        inputs={"input_ids": _IDS, "labels": "torch.randint(CLASSES, (size, length))"},
        has_length=True,
    ),
    "image-classification": Task(
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        inputs={"pixel_values": "torch.randn(size, CHANNELS, HEIGHT, WIDTH)", "labels": _CLASSES},
        has_length=False,
    ),
    "speech-seq2seq": Task(
        mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        inputs={"input_features": "torch.randn(size, BINS, FRAMES)", "labels": _IDS},
        has_length=True,
    ),
}
"""By the names that the library's pipelines have for them."""

_NOT_OF_A_MODEL = frozenset(
    {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
     "quantization_config", "_attn_implementation", "attn_implementation"}
)  # fmt: skip
"""What a configuration says of where it is from, of weights, and of the machine it ran on."""

HALF_DTYPES = ("bfloat16", "float16")
"""Dtypes of weights that are trained in bf16 with fp32 copies."""


def read(path: Path, asked: Asked) -> Opened:
    """Return the model of a config.json.

    Raises ModelError, in one line, for a file that is no such configuration, for a family or an
    architecture that the installed library lacks, and where the task or the length is missing.
    """
    values = _values(path)
    config = _config(path, values)
    architecture, task = _architecture(path, values, asked.task)
    sizes = _sizes(path, config, TASKS[task], asked)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    name = name_of(name, values["model_type"])
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    notes = [f"{path}: {architecture} for {task}, with random weights; {_told(sizes)}"]
    trained = {}
    if dtype in HALF_DTYPES:
        trained["precision"] = "bf16"
        notes.append(f"its weights are {dtype}: --precision bf16; model trains in fp32")
    if values.get("quantization_config"):
        notes.append("its quantization_config is left out: training has whole weights")
    return Opened(
        name=name,
        code=_code(path, values, config, architecture, task, sizes),
        trained=trained,
        notes=tuple(notes),
    )


def _values(path: Path) -> dict[str, Any]:
    values = parsed(path, json.loads, "JSON", "a Hugging Face config.json")
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        keys = values.keys() if isinstance(values, dict) else ()
        if {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"} & set(keys):
            raise ModelError(
                f"{path} is a DeepSpeed configuration, which has no model; give a model file, and "
                f"--deepspeed {path} beside it"
            )
        raise ModelError(f"{path} has no model_type; give a Hugging Face config.json")
    return values


def _config(path: Path, values: dict[str, Any]) -> Any:
    try:
        from transformers import CONFIG_MAPPING, __version__
    except ImportError:
        raise ModelError(
            f"{path} is built by the library transformers, which is not installed; install "
            "planner[hf]"
        ) from None
    family = values["model_type"]
    if family not in CONFIG_MAPPING:
        remote = ", but by code that it would fetch" if "auto_map" in values else ""
        raise ModelError(
            f"{path} has model_type {family!r}, which transformers {__version__} does not "
            f"build{remote}; write a .py file with model() and batch(size)"
        )
    try:
        return CONFIG_MAPPING[family].from_dict(values)
    except Exception as error:
        told = " ".join(str(error).split()) or repr(error)
        raise ModelError(f"{path} is refused by transformers {__version__}: {told}") from None


def _architecture(path: Path, values: dict[str, Any], asked: str | None) -> tuple[str, str]:
    """Return the class, and the task that it is for."""
    from transformers.models.auto import modeling_auto

    if asked is not None and asked not in TASKS:
        raise ModelError(f"--task {asked} is not known; give {', '.join(TASKS)}")
    family = values["model_type"]
    tables = {name: getattr(modeling_auto, task.mapping) for name, task in TASKS.items()}
    said = values.get("architectures") or []
    if not isinstance(said, list):
        raise ModelError(
            f"{path} has architectures {said!r}; it takes a list of names of classes, or nothing"
        )
    named = [name for name in said if isinstance(name, str)]
    of_family = {}
    for task, table in tables.items():
        classes = table.get(family, ())
        classes = (classes,) if isinstance(classes, str) else tuple(classes)
        if classes:
            # A family may have several for one task: the one that the file names comes first.
            of_family[task] = next((each for each in classes if each in named), classes[0])
    if asked is not None and asked in of_family:
        return of_family[asked], asked
    has = ", ".join(of_family) or "none that is written here: write a .py file"
    if asked is not None:
        raise ModelError(f"--task {asked} was given; {family} of {path} has {has}")
    for task, architecture in of_family.items():
        if architecture in named:
            return architecture, task
    names = f"names {', '.join(named)}, of no task that is written here" if named else "names none"
    raise ModelError(f"{path} {names}; give --task: {family} has {has}")


def _sizes(path: Path, config: Any, task: Task, asked: Asked) -> dict[str, int]:
    """Return the sizes that batches have, by the names they have in a model file."""
    told = " ".join(task.inputs.values())
    found: dict[str, int] = {}
    if task.has_length:
        most = _most_positions(config)
        if asked.seq_length is None:
            upto = f", at most {most}" if most else ""
            raise ModelError(
                f"{path} does not say how long a sample is; give --seq-length, in tokens{upto}"
            )
        if asked.seq_length < 1 or (most and asked.seq_length > most):
            raise ModelError(
                f"--seq-length {asked.seq_length} was given; {path} has from 1 to "
                f"{most or 'any number of'} positions"
            )
        found["SEQUENCE"] = asked.seq_length
        text = config.get_text_config(decoder=True)
        found["VOCABULARY"] = _size(path, text, "vocab_size", "decoder_vocab_size")
    elif asked.seq_length is not None:
        raise ModelError(
            f"--seq-length {asked.seq_length} was given; samples of {path} are no sequences: leave "
            "it out"
        )
    if "CLASSES" in told:
        found["CLASSES"] = config.num_labels
    if "CHANNELS" in told:
        image = getattr(config, "image_size", None)
        high_wide = image if isinstance(image, list | tuple) else (image or 224,) * 2
        if len(high_wide) != 2:
            raise ModelError(f"{path} has image_size {image!r}; it takes a number, or two")
        channels = getattr(config, "num_channels", 3)
        found |= dict(zip(("CHANNELS", "HEIGHT", "WIDTH"), (channels, *high_wide), strict=True))
    if "BINS" in told:
        found["BINS"] = _size(path, config, "num_mel_bins", "input_feat_per_channel")
        found["FRAMES"] = 2 * _size(path, config, "max_source_positions")
    for name, size in found.items():
        if type(size) is not int or size < 1:
            raise ModelError(
                f"{path} says that {name.lower()} is {size!r}, of which no batch can be made; it "
                "takes 1 or more"
            )
    return found


def _size(path: Path, config: Any, *names: str) -> int:
    for name in names:
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise ModelError(
        f"{path} has no {names[0]}, which batches need; write a .py file with model() and "
        "batch(size)"
    )


def _most_positions(config: Any) -> int:
    """Return the longest sequence that a model takes; 0: any."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"):
        if isinstance(most := getattr(text, name, None), int) and most > 0:
            return most
    return 0


def _told(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name.lower()} {size}" for name, size in sizes.items())


def _code(
    path: Path,
    values: dict[str, Any],
    config: Any,
    architecture: str,
    task: str,
    sizes: dict[str, int],
) -> str:
    """Return the text of a model file: `batch` draws its parts in the order of the task."""
    kept = {name: value for name, value in values.items() if name not in _NOT_OF_A_MODEL}
    if task == "causal-lm" and hasattr(config, "is_decoder") and not config.is_decoder:
        # (An encoder is one without what keeps it from looking ahead.)
        kept["is_decoder"] = True
    inputs, kind = TASKS[task].inputs, type(config).__name__
    if values.get("is_encoder_decoder") and values.get("decoder_start_token_id") is None:
        # The token that decoders begin with, where an older file leaves it to code: the padding.
        kept["decoder_start_token_id"] = values.get("pad_token_id") or 0
    # Labels of a language model are its tokens, which it shifts itself.
    shared = inputs.get("labels") == inputs.get("input_ids")
    lines = [f"    {name} = {made}" for name, made in inputs.items() if not shared]
    if shared:
        lines = [f"    ids = {_IDS}"]
    names = {name: "ids" if shared else name for name in inputs}
    batch = ", ".join(f'"{name}": {variable}' for name, variable in names.items())
    length = ", length=SEQUENCE" if "SEQUENCE" in sizes else ""
    return "\n".join(
        [
            f'"""A {architecture} for {task}, read from a config.json: random weights and data."""',
            "",
            "from math import inf, nan  # noqa: F401  (configurations may have them)",
            "",
            "import torch",
            f"from transformers import {kind}, {architecture}",
            "",
            f"SOURCE = {str(path.resolve())!r}",
            f"CONFIG = {pformat(kept, sort_dicts=False)}",
            *(f"{name} = {size}" for name, size in sizes.items()),
            "",
            "",
            "def model():",
            f"    return {architecture}({kind}.from_dict(CONFIG))",
            "",
            "",
            f"def batch(size{length}):",
            *lines,
            f"    return {{{batch}}}",
            "",
        ]
    )
