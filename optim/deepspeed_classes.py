"""DeepSpeed's classes of optimizers: torch's fused kernels with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .elementwise import Lion


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
        fp32_optimizer_states: True: the state has the dtype of the parameters, which under an engine is fp32.
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


DeepSpeedCPULion = FusedLion = Lion
DeepSpeedCPUAdagrad = torch.optim.Adagrad
