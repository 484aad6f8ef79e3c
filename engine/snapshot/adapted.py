"""Check that a checkpoint does not change the weights from which an adapted model's tensors were computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoint.snapshot import WEIGHTS


def require_same_base(own: Mapping[str, torch.dtype], stored: Mapping[str, Any], source: object) -> None:
    """Check that a checkpoint has the base of a model with adapters in the form in which the model keeps it.

    Args:
        own: name of a tensor in a checkpoint -> dtype, for each weight of the model on this rank.
        stored: name -> tensor of the checkpoint.
        source: the checkpoint, for messages.

    Raises:
        ValueError: the checkpoint has weights in floating point that the model keeps in 4 or 8 bits, or in another of
            these formats; or it has the weights of adapted layers without DoRA's norms, and the model's norms would not
            fit the loaded weights.
    """
    for name, dtype in own.items():
        layer, _, numbers = name.partition(".quantized.")
        adapted_weight = f"{name.partition('.lora.')[0]}.weight"
        short = layer.removeprefix(f"{WEIGHTS}/")
        if numbers and f"{layer}.weight" in stored:
            problem = f"{short}.weight in floating point, but the model keeps it in 4 or 8 bits"
        elif numbers and name in stored and stored[name].dtype != dtype:
            problem = f"{short} in another format of 4 or 8 bits than the model's: make the model with its lora.base"
        elif name.endswith(".magnitude") and name not in stored and adapted_weight in stored:
            problem = f"{adapted_weight.removeprefix(f'{WEIGHTS}/')}, but not the norms of its rows, which DoRA trains"
        else:
            continue
        raise ValueError(
            f"{source} has {problem}. Load the weights of a model before it gets adapters: triax.load_weights(model, "
            "path), then the engine with lora"
        )
