"""LAMB and Muon: optimizers whose update of an element depends on the layer that it is part of.

A layer is a parameter or, of experts that are stacked in one parameter (``Layout.expert_dim``), each expert. They run
on whole tensors in a plain loop. Under ZeRO they step flat ranges, and ``zero/sharded_layers.py`` replaces their
attribute ``layers`` by one that combines the shards of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...base.errors import describe
from ...grid.layout import layout_of

Function = Callable[[Tensor], Tensor]  # of a whole layer, or of a stack of matrices


class Layers(Protocol):
    """Protocol: the layers of which the stepped tensors hold parts."""

    def parts(self, stepped: Tensor) -> Sequence[tuple[Any, tuple[int, ...]]]:
        """Return the index of each layer's part in a stepped tensor, and the shape of the whole layer.

        A layer may have several parts, which follow each other.
        """

    def norms(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return for each stepped tensor and its update the 2-norms of the layers and of their updates, (parts, 2)."""

    def whole(self, updates: Sequence[tuple[Tensor, Tensor, Function]], dtype: torch.dtype) -> list[Tensor]:
        """Return the updates after a function of each layer's whole update.

        Args:
            updates: stepped tensor, its update, and the function.
            dtype: dtype in which the function is computed and the updates are sent.
        """


class WholeLayers:
    """Layers of a plain loop: each stepped tensor is one, or each of its experts."""

    def parts(self, stepped: Tensor) -> list[tuple[Any, tuple[int, ...]]]:
        """Return one part for each layer."""
        layout = layout_of(stepped)
        if layout.expert_dim is None:
            return [(..., tuple(stepped.shape))]
        before = (slice(None),) * layout.expert_dim
        return [((*before, number), tuple(one.shape)) for number, one in enumerate(layout.layers(stepped))]

    def norms(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the norms of each layer and of its update, (layers, 2)."""
        found = []
        for weights, update in pairs:
            layers = layout_of(weights).layers
            found.append(torch.stack([layer.norm() for both in zip(layers(weights), layers(update)) for layer in both]))
        return [norms.view(-1, 2) for norms in found]

    def whole(self, updates: Sequence[tuple[Tensor, Tensor, Function]], dtype: torch.dtype) -> list[Tensor]:
        """Return the function of each layer's update."""
        return [layout_of(p).map_layers(function, update.to(dtype)) for p, update, function in updates]


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base class of ``Lamb`` and ``Muon``.

    Attributes:
        layers: combines the parts of each layer; ZeRO replaces it.
    """

    layerwise = True  # by which ZeRO knows it

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        numbers = {"lr": defaults["lr"], "eps": defaults["eps"], "weight_decay": defaults["weight_decay"]}
        for name, value in numbers.items():
            if not value >= 0:
                raise ValueError(f"{name} is {value}: give a number of at least 0")
        if not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ValueError(f"betas are {defaults['betas']}: give numbers of at least 0 and less than 1")
        super().__init__(params, defaults)
        self.layers: Layers = WholeLayers()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what ``closure`` returns. Parameters without a gradient do not change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step([(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None])
        return loss

    def _step(self, stepped: Sequence[tuple[dict[str, Any], Tensor]]) -> None:
        """Step tensors, each with the options of its parameter group."""
        raise NotImplementedError

    def _adam(self, p: Tensor, group: Mapping[str, Any], bias_correction: bool = True) -> Tensor:
        """Update Adam's moments of a tensor; return their quotient, Adam's update without the learning rate."""
        state, (first, second) = self.state[p], group["betas"]
        if "exp_avg" not in state:
            state["step"], state["exp_avg"], state["exp_avg_sq"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        assert p.grad is not None
        mean: Tensor = state["exp_avg"].lerp_(p.grad, 1 - first)
        square: Tensor = state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
        corrections = [1 - beta ** int(state["step"]) if bias_correction else 1.0 for beta in (first, second)]
        return (mean / corrections[0]).div_(square.sqrt().div_(math.sqrt(corrections[1])).add_(group["eps"]))


class Lamb(LayerwiseOptimizer):
    """LAMB: Adam's update, scaled in each layer to the norm of the weights. You et al. 2020, arXiv:1904.00962, alg. 2.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as in torch's AdamW; the decay is a part of the update, and counts in its norm.
        bias_correction: correct both moments for their start from 0.
        max_coeff, min_coeff: limits of a layer's coefficient, the norm of its weights over that of its update. A layer
            of which one of the two is 0 has the coefficient 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"min_coeff is {min_coeff} and max_coeff {max_coeff}: give 0 <= min_coeff <= max_coeff")
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(
            params, {**options, "weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        )

    def _step(self, stepped: Sequence[tuple[dict[str, Any], Tensor]]) -> None:
        updates = [self._adam(p, g, g["bias_correction"]).add_(p, alpha=g["weight_decay"]) for g, p in stepped]
        norms = self.layers.norms([(p, update) for (_, p), update in zip(stepped, updates, strict=True)])
        for (group, p), update, pair in zip(stepped, updates, norms, strict=True):
            weights, steps = pair.to(p.dtype).unbind(1)
            ratio = (weights / steps).clamp(group["min_coeff"], group["max_coeff"])
            ratio = torch.where((weights > 0) & (steps > 0), ratio, torch.ones_like(ratio))
            for (layer, _), coefficient in zip(self.layers.parts(p), ratio, strict=True):
                update[layer].mul_(coefficient)
            p.sub_(update, alpha=group["lr"])


class Muon(LayerwiseOptimizer):
    """Muon: the momentum of a hidden matrix, made orthogonal by Newton-Schulz iterations; AdamW for all other tensors.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. The matrices step as under ``torch.optim.Muon``;
    ``muon_groups`` chooses between Muon and AdamW by names.

    Args:
        params: parameters, or groups of them, of which each may have ``use_muon``: see ``muon_groups``.
        lr: of both parts.
        muon_lr, adam_lr: of one part, in place of ``lr``, for groups that have ``use_muon`` and no rate of their own.
        weight_decay: decoupled, of both parts.
        momentum, nesterov: of the matrices.
        ns_coefficients, ns_steps, ns_eps: of the Newton-Schulz iteration.
        ns_dtype: dtype of the iteration: bfloat16, as torch's; float32 or float64.
        adjust_lr_fn: factor of a matrix's rate, as in torch: ``original``, sqrt(max(1, rows / columns));
            ``match_rms_adamw``, 0.2 sqrt(max(rows, columns)).
        betas, eps: of AdamW.
        use_muon: of groups that do not say it; None: of every layer of two dims or more.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        ns_dtype: str = "bfloat16",
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        use_muon: bool | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
    ) -> None:
        if ns_dtype not in ("bfloat16", "float32", "float64"):
            raise ValueError(f"ns_dtype is {describe(ns_dtype)}: give bfloat16, float32 or float64")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn is {describe(adjust_lr_fn)}: give original or match_rms_adamw")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}: give a number of at least 0 and less than 1")
        iteration = {"ns_coefficients": tuple(ns_coefficients), "ns_steps": ns_steps, "ns_eps": ns_eps}
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        rest = {"ns_dtype": ns_dtype, "adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps, "use_muon": use_muon}
        given = list(params)
        for use, rate in ((True, muon_lr), (False, adam_lr)):
            if rate is not None and not all(isinstance(group, dict) for group in given):
                raise ValueError(f"a rate of {rate} is for one part of the parameters: pass muon_groups(model)")
            if rate is not None:
                given = [{"lr": rate, **group} if group.get("use_muon", use_muon) is use else group for group in given]
        super().__init__(given, {**options, **iteration, **rest})

    def _step(self, stepped: Sequence[tuple[dict[str, Any], Tensor]]) -> None:
        matrices = []
        for group, p in stepped:
            if group["use_muon"] is None and not isinstance(self.layers, WholeLayers):
                raise ValueError(
                    "a parameter group has no use_muon, but ZeRO makes flat ranges, which are no matrices: pass the "
                    "groups that triax.engine.optim.layerwise.muon_groups(model) returns"
                )
            if layout_of(p).layer_dims >= 2 if group["use_muon"] is None else group["use_muon"]:
                matrices.append((group, p))
                continue
            update = self._adam(p, group)
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
        for dtype in dict.fromkeys(group["ns_dtype"] for group, _ in matrices):
            self._orthogonal([matrix for matrix in matrices if matrix[0]["ns_dtype"] == dtype], getattr(torch, dtype))

    def _orthogonal(self, matrices: Sequence[tuple[dict[str, Any], Tensor]], dtype: torch.dtype) -> None:
        """Step matrices whose iteration has one dtype."""
        updates: list[tuple[Tensor, Tensor, Function]] = []
        for group, p in matrices:
            state, gradient = self.state[p], p.grad
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
            updates.append((p, update, _iteration(group)))
        for (group, p), update in zip(matrices, self.layers.whole(updates, dtype), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            for layer, shape in self.layers.parts(p):
                rows, columns = matrix_shape(shape)
                factor = math.sqrt(max(1, rows / columns))
                if group["adjust_lr_fn"] == "match_rms_adamw":
                    factor = 0.2 * math.sqrt(max(rows, columns))
                p[layer].sub_(update[layer], alpha=group["lr"] * factor)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of the matrices in a tensor: three dims are a stack, more than three are one matrix."""
    return (shape[1], shape[2]) if len(shape) == 3 else (shape[0], math.prod(shape[1:]))


def newton_schulz(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return a matrix of about the same singular vectors whose singular values are near 1.

    Args:
        matrix: (rows, columns), or a stack of matrices (n, rows, columns).
        coefficients: a, b and c of the iteration X <- a X + (b A + c A A) X, A = X X^T.
        steps: number of iterations.
        eps: least norm that the matrix is divided by.
    """
    a, b, c = coefficients
    product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    for _ in range(steps):
        square = x @ x.mT
        x = product(x, product(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _iteration(group: Mapping[str, Any]) -> Function:
    def orthogonal(whole: Tensor) -> Tensor:
        flat = whole if whole.dim() <= 3 else whole.flatten(1)
        return newton_schulz(flat, group["ns_coefficients"], group["ns_steps"], group["ns_eps"]).reshape(whole.shape)

    return orthogonal


Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]
_NOT_HIDDEN = ("embed", "lm_head")  # in a parameter's name; in a class's name also "head"


def is_hidden_matrix(name: str, parameter: nn.Parameter, owner: str = "") -> bool:
    """Return True if Muon steps a parameter, and False if AdamW does.

    An attribute ``use_muon`` of the parameter decides. Without it Muon steps layers of two dims or more (the biases of
    experts, (E, D), have one), except those of embeddings and of output layers.

    Args:
        name: name of the parameter in its model.
        parameter: the parameter.
        owner: name of the class of its module.
    """
    chosen = getattr(parameter, "use_muon", None)
    if chosen is not None:
        return bool(chosen)
    outer = any(word in owner.lower() for word in ("embedding", "head")) and "attention" not in owner.lower()
    return layout_of(parameter).layer_dims >= 2 and not outer and not any(word in name.lower() for word in _NOT_HIDDEN)


def split_for_muon(model: nn.Module, groups: Groups) -> Groups:
    """Split each parameter group in two: hidden matrices for Muon, and the others for AdamW.

    Args:
        model: the model of the parameters.
        groups: the parameter groups, (options, parameters).
    """
    hidden: dict[nn.Parameter, bool] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            here = is_hidden_matrix(f"{prefix}.{name}", parameter, type(module).__name__)
            hidden[parameter] = here and hidden.get(parameter, True)  # tied to an embedding: not hidden
    return [
        ({"use_muon": use_muon, **options}, [p for p in parameters if hidden.get(p, False) is use_muon])
        for options, parameters in groups
        for use_muon in (True, False)
    ]


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of a model for ``Muon``: its hidden matrices, and its other parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    halves = split_for_muon(model, [({}, trained)])
    return [{**options, "params": parameters} for options, parameters in halves if parameters]
