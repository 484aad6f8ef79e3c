"""Optimizer, learning-rate schedule and gradient compression by name, where a file names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from ..base.errors import describe
from ..base.option_error import OptionError
from .base import Options, option


@dataclass(frozen=True, init=False)
class _Named(Options):
    """A class by its name, and its arguments, which stand beside the name."""

    MAIN: ClassVar = "type"

    type: str = option("", "Name of the class.")
    arguments: dict[str, Any] = option(dict, "Arguments of the class.")

    def __init__(self, type: str, /, **arguments: Any) -> None:
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "arguments", arguments)
        self.__post_init__()

    def plain(self, given: bool = False) -> dict[str, Any]:
        """Return the name and the arguments, as a file has them."""
        found = super().plain()
        arguments: dict[str, Any] = found["arguments"]
        return {"type": self.type, **arguments}

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the section for a name, or for a mapping of ``type`` and the arguments."""
        if isinstance(value, Mapping):
            if not isinstance(value.get("type"), str):
                raise OptionError("type", reason=f"give a name, not {describe(value.get('type'))}")
            return cls(value["type"], **{key: each for key, each in value.items() if key != "type"})
        return cls(value) if isinstance(value, str) else super().of(value)


@dataclass(frozen=True, init=False)
class Optimizer(_Named):
    """Optimizer by name, as ``Optimizer("Muon", lr=0.02)``: of torch.optim, or of triax.

    In Python a function does the same: ``functools.partial(torch.optim.AdamW, lr=1e-3)``. Adafactor needs whole
    tensors: ZeRO stage 0. ``state`` keeps the optimizer's state in fewer bits between two steps, with the same numbers
    on every grid.

    >>> engine = triax.Engine(nn.Linear(4, 1), optimizer=triax.Optimizer("AdamW", lr=1e-3), batch=1)
    >>> [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    [(0.001, 0.01)]
    """

    state: Literal["bf16", "int8", "int4"] | None = option(
        None,
        "Optimizer state between two steps: bf16, or codes of 8 or 4 bits with a scale for each 64 elements; for "
        "elementwise optimizers. None: full precision.",
    )

    def __init__(self, type: str, /, state: Literal["bf16", "int8", "int4"] | None = None, **arguments: Any) -> None:
        object.__setattr__(self, "state", state)
        super().__init__(type, **arguments)

    def plain(self, given: bool = False) -> dict[str, Any]:
        """Return the name, the arguments and the kind of state, if it is given, as a file has them."""
        return super().plain(given) | ({} if self.state is None else {"state": self.state})


@dataclass(frozen=True, init=False)
class LRSchedule(_Named):
    """Learning-rate schedule by name, stepped after each optimizer step.

    WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, ReduceLROnPlateau (which follows the loss), or
    another class of torch.optim.lr_scheduler, with its arguments.

    >>> model = triax.PipelineModule([triax.LayerSpec(nn.Linear, 4, 1)], loss_fn=nn.functional.mse_loss)
    >>> warmup = triax.LRSchedule("WarmupLR", warmup_max_lr=0.1, warmup_num_steps=4, warmup_type="linear")
    >>> engine = triax.Engine(model, optimizer=triax.Optimizer("SGD", lr=0.1), lr_scheduler=warmup, batch=1)
    >>> for step in range(3):
    ...     loss = engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 1))]))
    ...     print(engine.lr)
    [0.0]
    [0.025]
    [0.05]
    """


@dataclass(frozen=True, init=False)
class GradientCompression(_Named):
    """Compression of the sum of gradients by name, for ZeRO stages 0 and 1.

    ``topk`` sends the largest elements (Lin et al. 2018), ``powersgd`` low-rank matrices (Vogels et al. 2019), and
    ``sparse_rows`` the rows of embeddings' gradients that are not zero. The arguments are those of ``TopK`` and
    ``PowerSGD``, which do the same in Python.
    """
