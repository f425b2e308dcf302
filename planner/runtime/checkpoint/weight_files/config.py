"""What stands beside the weights of a Hugging Face model, so that `from_pretrained` loads them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from planner.capture.outside import stored_tensors
from planner.errors import PlanError
from planner.runtime.checkpoint.weight_files.safetensors_files import Named


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of Hugging Face's, which has a config."""
    transformers = sys.modules.get("transformers")  # of such a model it is loaded
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def write_config(folder: Path, model: Any) -> None:
    """Write `config.json` of a Hugging Face model, and how it generates where it does."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # as its own `save_pretrained` has it
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def refuse_other_weights(named: Sequence[Named], model: nn.Module, source: Path) -> None:
    """Raise PlanError for weights that a model has not, or has in another shape."""
    own = stored_tensors(model)
    for each in named:
        if each.name not in own:
            raise PlanError(
                f"{source} has {each.name}, which the model has not; give the model that it was "
                "trained with"
            )
        if tuple(own[each.name].shape) != each.shape:
            raise PlanError(
                f"{each.name} is {each.shape} in {source} and {tuple(own[each.name].shape)} in "
                "the model; give the model that it was trained with"
            )
