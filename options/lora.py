"""Low-rank adapters of frozen linear layers (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..base.option_error import OptionError
from .base import Options, option


@dataclass(frozen=True, kw_only=True)
class Lora(Options):
    """Train low-rank updates of linear layers, and freeze all other parameters (Hu et al. 2021, arXiv:2106.09685).

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> lora = triax.Lora(rank=2, targets=("0",))
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("Adam"), batch=1, lora=lora)
    >>> [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    [('0.lora.0.A', (2, 8)), ('0.lora.0.B', (8, 2))]
    """

    MAIN: ClassVar = "rank"

    rank: int = option(8, "Rank r of the updates (PEFT: r).", least=1, most=65536)
    alpha: float = option(8.0, "The updates are scaled by alpha / rank (PEFT: lora_alpha).", above=0.0)
    targets: tuple[str, ...] | str = option(
        "all-linear",
        "Names of the layers to adapt, or the ends of their names, in the model or in transformers' model of its "
        "family; or a regular expression for whole names; all-linear: all but the output layer (PEFT: target_modules).",
    )
    rslora: bool = option(False, "Scale by alpha / sqrt(rank) instead (PEFT: use_rslora).")
    dropout: float = option(
        0.0,
        "Probability that training drops an element of the input of A (PEFT: lora_dropout).",
        least=0.0,
        below=1.0,
    )
    dora: bool = option(
        False,
        "DoRA: train the norm of each row of an adapted weight apart from the direction of the row (PEFT: use_dora).",
    )

    base: Literal["nf4", "nf4-double", "int8"] | None = option(
        None,
        "Keep the frozen weights of linear layers in 4 bits (nf4: QLoRA; nf4-double: with scales in 8 bits too) or in "
        "8 bits (int8); None: in the model's dtype.",
    )

    def check(self) -> None:
        """Check that there is something to adapt."""
        if not self.targets:
            raise OptionError("targets", self.targets, "give the names of layers to adapt, or all-linear")
