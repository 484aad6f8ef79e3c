"""Inputs and outputs of every module in one forward pass, and the first module that differs from one process's.

Modules are compared in the order in which their forward passes end, so that a layer's parts come before the layer. On
the ranks of an axis a value may be whole on each rank, a slice along one dim, or a summand: these are right. If the
first module that has another output has a right input, the module is named, else the code between the modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.nest import tensors_of
from ..pipe.module import PipelineModule


class ModuleCall(NamedTuple):
    """One call of a module.

    Attributes:
        name: its name in the whole model.
        kind: name of its class.
        place: file and line of its class, ``model.py:12``; "" if it has no source.
        inputs, outputs: the tensors, in float64.
    """

    name: str
    kind: str
    place: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def record(model: PipelineModule, inputs: Any, fields: dict[str, Any]) -> list[ModuleCall]:
    """Run the forward pass of a model of one stage, and return the calls of its modules in the order of their ends."""
    found: list[ModuleCall] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = [*tensors_of(list(args)), *tensors_of(list(kwargs.values()))]
        mine = [_kept(tensor) for tensor in tensors], [_kept(tensor) for tensor in tensors_of(output)]
        found.append(ModuleCall(names[module], type(module).__name__, _place(module), *mine))

    handles = [
        module.register_forward_hook(note, with_kwargs=True)
        for name, module in model.named_modules()
        if name.startswith("layers.")
    ]
    try:
        with torch.no_grad():
            model.run_stage(0, inputs, fields)
    finally:
        for handle in handles:
            handle.remove()
    return found


def first_difference(whole: Sequence[ModuleCall], ranks: Sequence[Sequence[ModuleCall]], rtol: float) -> str:
    """Return in words where the ranks of an axis first compute something else than one process; "" if nowhere."""
    for at, one in enumerate(whole):
        mine = [records[at] if at < len(records) else None for records in ranks]
        if any(each is None or each.name != one.name for each in mine):
            return f"the modules run in another order from {one.name} ({one.kind}) on"
        parts = [each for each in mine if each is not None]
        wrong = _first_wrong([each.outputs for each in parts], one.outputs, rtol)
        if wrong is None:
            continue
        where = f"{one.name} ({one.kind}{', ' + one.place if one.place else ''})"
        if _first_wrong([each.inputs for each in parts], one.inputs, rtol) is None:
            return f"the output of {where} differs, and its input does not: {wrong}"
        owner = one.name.rpartition(".")[0]
        holder = next((each for each in whole[at:] if each.name == owner), None)
        inside = f"in the forward of {owner} ({holder.kind}, {holder.place})" if holder else "between two layers"
        before = next((each.name for each in reversed(whole[:at]) if each.name.rpartition(".")[0] == owner), "")
        after = f" after {before}" if before else ""
        return f"the input of {where} differs, computed {inside}{after}: {wrong}"
    return ""


def _first_wrong(parts: list[list[Tensor]], whole: list[Tensor], rtol: float) -> str | None:
    """Return the first value that is neither whole, nor in slices, nor in summands; None if all are."""
    for index, one in enumerate(whole):
        mine = [each[index] for each in parts if index < len(each)]
        if len(mine) != len(parts):
            return f"{len(parts[0])} tensors, and {len(whole)} on one process"
        if not _fits(mine, one, rtol):
            shapes = sorted({tuple(each.shape) for each in mine})
            if tuple(one.shape) in shapes:
                error = (mine[0] - one).abs()
                at = tuple(int(i) for i in torch.unravel_index(error.nan_to_num(torch.inf).argmax(), error.shape))
                return f"{mine[0][at].item():.12g} at {at}, and on one process {one[at].item():.12g}"
            return f"shapes {', '.join(map(str, shapes))}, and on one process {tuple(one.shape)}"
    return None


def _fits(parts: list[Tensor], whole: Tensor, rtol: float) -> bool:
    """Return True if each part is the whole, or the parts are slices along a dim, or summands."""
    if all(_near(part, whole, rtol) for part in parts):
        return True
    count, shape = len(parts), parts[0].shape
    if any(part.shape != shape for part in parts):
        return False
    if shape == whole.shape:
        return _near(torch.stack(parts).sum(0), whole, rtol)
    dims = [d for d in range(whole.dim()) if shape[d] * count == whole.shape[d]] if len(shape) == whole.dim() else []
    for dim in dims:
        # Sections that are cut one by one, such as queries, keys and values in one product.
        for sections in (1, 2, 3):
            if shape[dim] % sections == 0:
                pieces = [part.unflatten(dim, (sections, -1)) for part in parts]
                if _near(torch.cat(pieces, dim + 1).flatten(dim, dim + 1), whole, rtol):
                    return True
        if shape[dim] % 2 == 0:  # of a sequence, rank r has the parts r and 2 c - 1 - r (context/order.py)
            halves = [part.chunk(2, dim) for part in parts]
            if _near(torch.cat([*(a for a, _ in halves), *(b for _, b in halves[::-1])], dim), whole, rtol):
                return True
    return False


def _near(found: Tensor, wanted: Tensor, rtol: float) -> bool:
    if found.shape != wanted.shape:
        return False
    if not wanted.numel():
        return True
    return bool(((found - wanted).abs() <= rtol * wanted.abs().max() + 1e-14).all())


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().double().clone()


def _place(module: nn.Module) -> str:
    """Return file and line of a module's class, for classes outside of torch."""
    try:
        file, (_, line) = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module))
    except (OSError, TypeError):
        return ""
    return f"{Path(file or '').name}:{line}" if not type(module).__module__.startswith("torch.") else ""
