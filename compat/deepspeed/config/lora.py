"""Section ``lora``: low-rank adapters of frozen linear layers, under the names of triax or of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from .base import Section, setting

# PEFT's name of a key -> its name here.
_PEFT = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
    "lora_dropout": "dropout",
    "use_dora": "dora",
}


class LoraConfig(Section):
    """``lora``: train low-rank updates of linear layers, and freeze all other parameters."""

    rank: int = setting(8, "Rank r of the updates (PEFT: r).", ge=1)
    alpha: float = setting(8.0, "The updates are scaled by alpha / rank (PEFT: lora_alpha).", gt=0.0)
    targets: list[str] | str = setting(
        "all-linear",
        "Names of the layers to adapt, or the ends of their names, in the model or in transformers' model of its "
        "family; or a regular expression for whole names; all-linear: all but the output layer (PEFT: target_modules).",
    )
    rslora: bool = setting(False, "Scale by alpha / sqrt(rank) instead (PEFT: use_rslora).")
    dropout: float = setting(
        0.0, "Probability that training drops an element of the input of A (PEFT: lora_dropout).", ge=0.0, lt=1.0
    )
    dora: bool = setting(
        False,
        "DoRA: train the norm of each row of an adapted weight apart from the direction of the row (PEFT: use_dora).",
    )

    base: Literal["nf4", "nf4-double", "int8"] | None = setting(
        None,
        "Keep the frozen weights of linear layers in 4 bits (nf4: QLoRA; nf4-double: with scales in 8 bits too) or in "
        "8 bits (int8); null: in the model's dtype.",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_of_peft(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        for theirs, ours in _PEFT.items():
            if theirs in given:
                if ours in given:
                    raise ValueError(f"{theirs} is PEFT's name of {ours}, and both are given: give only {ours}")
                given[ours] = given.pop(theirs)
        return given
