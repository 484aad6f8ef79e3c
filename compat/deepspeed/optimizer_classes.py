"""DeepSpeed's classes of optimizers: torch's fused kernels with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.optim.elementwise import Lion


class FusedAdam(torch.optim.Adam):
    """AdamW, or Adam with ``adam_w_mode=False``, by torch's fused kernel.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay, amsgrad: as in torch; the decay is 0 by default.
        bias_correction: True; the configuration's ``optimizer`` takes false.
        adam_w_mode: decay the weights; False: add the decay to the gradient.
        set_grad_none: without effect: ``zero_grad`` frees the gradients, as in torch.

    Raises:
        ValueError: ``bias_correction`` is false.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **options: Any,
    ) -> None:
        if not bias_correction:
            raise ValueError(
                f"{type(self).__name__}(bias_correction=False) is not possible as a class: let the configuration make "
                'it, "optimizer": {"type": "Adam", "params": {"bias_correction": false}}'
            )
        options = {"fused": True, "decoupled_weight_decay": adam_w_mode, **options}  # the engine gives it all options
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class DeepSpeedCPUAdam(FusedAdam):
    """``FusedAdam`` under the name that DeepSpeed gives it on the CPU.

    Args:
        model_params: parameters, or groups of them.
        lr, bias_correction, betas, eps, weight_decay, amsgrad: as ``FusedAdam``.
        adamw_mode: as its ``adam_w_mode``.
        fp32_optimizer_states: keep the state of bf16 and fp16 parameters in fp32, and compute their update in fp32;
            False: in their own dtype. Under an engine the masters' dtype decides.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad, **options)
        self.fp32_optimizer_states = fp32_optimizer_states

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, and return what ``closure`` returns, which computes the gradients before."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        with self._in_fp32():
            super().step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; torch casts it to the dtype of the parameters."""
        with self._in_fp32():
            super().load_state_dict(state_dict)

    @contextmanager
    def _in_fp32(self) -> Iterator[None]:
        """Context in which parameters of lower precision and their gradients are fp32, if their state is to be."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        low = (torch.bfloat16, torch.float16) if self.fp32_optimizer_states else ()
        kept = [(p, p.data, p.grad) for p in parameters if p.dtype in low]
        for parameter, data, gradient in kept:
            parameter.grad = None  # torch wants one dtype of both
            parameter.data = data.float()
            parameter.grad = None if gradient is None else gradient.float()
        try:
            yield
        finally:
            for parameter, data, gradient in kept:
                data.copy_(parameter.data)
                parameter.grad = None
                parameter.data = data
                parameter.grad = gradient


DeepSpeedCPULion = FusedLion = Lion
DeepSpeedCPUAdagrad = torch.optim.Adagrad
