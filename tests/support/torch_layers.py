"""Layers of torch's families over a nest of tensors, for random compositions: each is one entry of a model's list.

A value between two layers is a tensor x (B, T, WIDTH), or a tuple or dict that contains it first or as "x". Each layer
changes x and hands on the rest; ``split`` and its relatives make nests, ``merge`` makes a tensor again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from triax.grid import Grid
from triax.grid.randomness.random import Dropout
from triax.tensor_parallel import ColumnParallelLinear, RowParallelLinear

WIDTH, LONGEST, TOKENS = 8, 8, 11
Value = Any  # a tensor, or a nest that contains it


def main(value: Value) -> Tensor:
    """Return the tensor x of a nest."""
    while not isinstance(value, Tensor):
        value = value["x"] if isinstance(value, dict) else value[0]
    return value


def with_main(value: Value, x: Tensor) -> Value:
    """Return the nest with another x."""
    if isinstance(value, Tensor):
        return x
    if isinstance(value, dict):
        return {**value, "x": with_main(value["x"], x)}
    return type(value)([with_main(value[0], x), *value[1:]])


def at_least_single(x: Tensor) -> Tensor:
    """Return x in a dtype that has complex numbers."""
    return x.float() if x.dtype.itemsize < 4 else x


class Over(nn.Module):
    """Base class of layers that change x alone."""

    def forward(self, value: Value) -> Value:
        return with_main(value, self.change(main(value)))

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Residual(Over):
    """x + f(inner(x)) of a module of torch."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = make(), call

    def change(self, x: Tensor) -> Tensor:
        return x + self.call(self.inner, x)


def over_channels(inner: nn.Module, x: Tensor) -> Tensor:
    """Call a module of (B, channels, T)."""
    y: Tensor = inner(x.transpose(1, 2)).transpose(1, 2)
    return y


def over_images(inner: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = inner(x[:, None])[:, 0]
    return y


def first_output(inner: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = inner(x)[0]
    return y


def attend(inner: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = inner(x, x, x, need_weights=False)[0]
    return y


def places(inner: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = inner(torch.arange(x.shape[1]))
    return y


def pooled(inner: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = inner(torch.arange(x.shape[1])[None].expand(x.shape[0], -1))
    return y[:, None]


def plainly(inner: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = inner(x)
    return y


def recomputed(inner: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(inner, x, use_reentrant=False)
    return y


class Scale(Over):
    """A parameter without dims, and one that is a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def change(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Lists(Over):
    """Parameters in a ``ParameterList`` and a ``ParameterDict``; one of them is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) / 4, "b": torch.zeros(0, WIDTH)})

    def change(self, x: Tensor) -> Tensor:
        for each in self.listed:
            x = x + each
        return torch.cat([x @ self.named["a"], self.named["b"].expand(x.shape[0], 0, WIDTH)], dim=1)


class Partly(Over):
    """Parameters that are frozen, that are never used, that are used twice, and that some samples use."""

    def __init__(self, rare: bool = False) -> None:
        super().__init__()
        self.twice, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.rare = nn.Linear(WIDTH, WIDTH) if rare else None
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)

    def change(self, x: Tensor) -> Tensor:
        y = self.twice(torch.tanh(self.twice(x) * self.frozen)) * self.mask
        if self.rare is not None and x.detach()[0, 0, 0] > 0:
            y = y + self.rare(x)
        return x + y


class Frozen(Over):
    """A layer of which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def change(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class InPlace(Over):
    """Changes a tensor of its own in place, and with ``own=False`` its input."""

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(WIDTH, WIDTH), own

    def change(self, x: Tensor) -> Tensor:
        # Of a copy: a linear layer keeps its input for the backward pass, and copies it only if it is not contiguous,
        # so that plain torch allows the change of this input for some layers before this one and not for others.
        y: Tensor = self.inner(x if self.own else x.clone())
        if self.own:
            return y.mul_(0.5).add_(x)
        return x.add_(y) if not (x.is_leaf and x.requires_grad) else x + y


class Transposed(Over):
    """Returns a tensor that is not contiguous: a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def change(self, x: Tensor) -> Tensor:
        return (self.weight @ x.transpose(1, 2)).transpose(1, 2)


class Expanded(Over):
    """Returns an expanded view: all rows share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def change(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.mean(1, keepdim=True))
        return y.expand(-1, x.shape[1], -1)


class Square(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


class Custom(Over):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def change(self, x: Tensor) -> Tensor:
        y: Tensor = Square.apply(torch.tanh(self.inner(x)))
        return x + y


class Spectrum(Over):
    """Complex numbers within the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def change(self, x: Tensor) -> Tensor:
        wide = at_least_single(x)
        return torch.fft.ifft(torch.fft.fft(wide, dim=2) * self.gain, dim=2).real.to(x.dtype)


class Cut(Over):
    """Hands on x without its gradient: what is before it is trained by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def change(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.detach())
        return y


class Sharded(Over):
    """The two linear layers of a block, sharded over the tensor axis."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 3 * WIDTH, grid=grid, unit=1)
        self.down = RowParallelLinear(3 * WIDTH, WIDTH, grid=grid, unit=1)

    def change(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return x + y


class Dropped(Over):
    """triax's dropout, the same on every grid."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(WIDTH, WIDTH), Dropout(0.3)

    def change(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.inner(x))
        return x + y


class Table(Over):
    """x W, whose weight ``Head`` may share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def change(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Head(Table):
    """x W^T, with a bias that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def change(self, x: Tensor) -> Tensor:
        return x + x @ self.weight.T + self.bias


class Tokens(nn.Embedding):
    """Ids (B, T) -> x; ``sparse`` as torch's."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__(TOKENS, WIDTH, sparse=sparse)

    def forward(self, value: Value) -> Value:
        return with_main(value, super().forward(main(value)))


class Split(nn.Module):
    """Makes a nest: a tuple, a dict, a list, two views of one tensor, one tensor twice, or numbers beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, value: Value) -> Value:
        x = main(value)
        y = torch.tanh(self.inner(x))
        if self.kind == "dict":
            return {"x": x, "y": y, "count": torch.arange(x.shape[1])}
        if self.kind == "list":
            return [x, [y, {"none": None}]]
        if self.kind == "views":
            return tuple((x + y).chunk(2, dim=-1))
        if self.kind == "twice":
            return (y, y)
        if self.kind == "constants":
            return (x + y, 1.5, None, "text", True, x[:, :0])
        if self.kind == "complex":
            return (x, torch.complex(at_least_single(x), at_least_single(y)))
        return (x, y, x.detach() > 0)


class Merge(nn.Module):
    """Adds all floating-point tensors of a nest of the shape of x, or joins its two views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: Value) -> Tensor:
        found = _tensors(value)
        if len(found) == 2 and found[0].shape[-1] == WIDTH // 2:
            return torch.cat(found, dim=-1) * self.weight
        x = found[0] * self.weight
        for each in found[1:]:
            if each.is_complex():
                x = x + (each.real + 0.5 * each.imag).to(x.dtype)
            elif each.shape == x.shape and each.dtype == x.dtype:
                x = x + each
        return x


def _tensors(value: Value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _residual(
    make: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor] = plainly
) -> Callable[[], Any]:
    return lambda: Residual(make, call)


# Name -> function that makes the layer. Those that need a grid take it.
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "linear": _residual(lambda: nn.Linear(WIDTH, WIDTH)),
    "no_bias": _residual(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "stack": _residual(lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.Sequential(nn.GELU()), nn.Linear(12, WIDTH))),
    "conv": _residual(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), over_channels),
    "depthwise": _residual(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), over_channels),
    "deconv": _residual(lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1), over_channels),
    "conv2d": _residual(lambda: nn.Conv2d(1, 1, 3, padding=1), over_images),
    "layer_norm": _residual(lambda: nn.LayerNorm(WIDTH)),
    "rms_norm": _residual(lambda: nn.RMSNorm(WIDTH)),
    "group_norm": _residual(lambda: nn.GroupNorm(2, WIDTH), over_channels),
    "batch_norm": _residual(lambda: nn.BatchNorm1d(WIDTH), over_channels),
    "attention": _residual(lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), attend),
    "encoder": _residual(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)),
    "gru": _residual(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), first_output),
    "lstm": _residual(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), first_output),
    "rnn": _residual(lambda: nn.RNN(WIDTH, WIDTH, 2, batch_first=True), first_output),
    "bilinear": _residual(lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda inner, x: inner(x, x)),
    "prelu": _residual(lambda: nn.PReLU()),
    "weight_norm": _residual(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "positions": _residual(lambda: nn.Embedding(LONGEST, WIDTH), places),
    "bag": _residual(lambda: nn.EmbeddingBag(LONGEST, WIDTH, mode="sum"), pooled),
    "activation": _residual(nn.Tanh),
    "checkpointed": _residual(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), recomputed),
    "scale": Scale,
    "lists": Lists,
    "partly": Partly,
    "rare": lambda: Partly(rare=True),
    "frozen": Frozen,
    "in_place": InPlace,
    "in_place_input": lambda: InPlace(own=False),
    "transposed": Transposed,
    "expanded": Expanded,
    "custom": Custom,
    "spectrum": Spectrum,
    "cut": Cut,
    "dropout": Dropped,
    "table": Table,
    "head": Head,
    "merge": Merge,
    "tokens": Tokens,
    "sparse_tokens": lambda: Tokens(sparse=True),
    **{f"split_{kind}": (lambda kind=kind: Split(kind)) for kind in ("tuple", "dict", "list", "views", "twice")},
    "split_constants": lambda: Split("constants"),
    "split_complex": lambda: Split("complex"),
    "sharded": lambda grid: Sharded(grid),
}
# Layers that run no parameters: functions in the list.
FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "tanh": lambda value: with_main(value, torch.tanh(main(value))),
    "same": lambda value: value,
    "relu_in_place": lambda value: with_main(value, F.relu(main(value) * 1.0, inplace=True)),
}


def mean_of(outputs: Value, labels: Tensor) -> Tensor:
    """Mean squared error of a nest's x."""
    return (main(outputs) - labels).square().mean()


def summed(outputs: Value, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squared errors where labels are positive, and how many these are."""
    counts = labels > 0
    return ((main(outputs) - labels).square() * counts).sum(), counts.sum()
