"""transformers' models in fp64 without the roundings to fp32 within, which decide on the eighth digit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Exact(TorchFunctionMode):
    """transformers' norms, routers and losses round fp64 to fp32. Within this they do not, save for rotary angles."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.rounds:
            function = Tensor.double if function is Tensor.float else function
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


@contextmanager
def exact(model: Any) -> Iterator[None]:
    mode = Exact()

    def begin(*_: Any) -> None:
        mode.rounds += 1

    def end(module: Any, inputs: Any, output: Any) -> Any:
        if (
            torch.is_tensor(output) and output.is_complex()
        ):  # cos and sin as one complex number, which torch.polar rounds otherwise than cos
            angles = inputs[1][..., None].float() * module.inv_freq.float()
            output = torch.complex(angles.cos(), angles.sin()) * module.attention_scaling
        mode.rounds -= 1
        return output

    rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    hooks: list[Any] = [module.register_forward_pre_hook(begin) for module in rotary]
    hooks += [module.register_forward_hook(end) for module in rotary]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()
