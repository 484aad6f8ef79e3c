"""Inputs and outputs of every module in one forward pass, and the first module and op that differ from one process's.

Modules are compared in the order in which their forward passes end, so that a layer's parts come before the layer. On
the ranks of an axis a value may be whole on each rank, a slice along one dim, or a summand: these are right. If the
first module that has another output has a right input, the module is named, else the code between the modules.

A second pass records the aten ops of that module's own code, with their lines. The ranks may run other ops than one
process, so ops are matched by line, name and how often this line has called it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.nest import tensors_of
from ..base.torch_private import TorchDispatchMode
from ..pipe.module import PipelineModule
from .equality import errors


class ModuleCall(NamedTuple):
    """One call of a module.

    Attributes:
        name: its name in the whole model.
        kind: name of its class.
        place: file and line of its class, ``model.py:12``; "" if it has no source.
        inputs, outputs: the tensors, in float64 or complex128.
    """

    name: str
    kind: str
    place: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class OpCall(NamedTuple):
    """One call of an op.

    Attributes:
        name: ``aten.mean``.
        place: file and line of the code that called it, ``model.py:34``; "" if triax's own code did.
        repeat: how often this line had called this op before.
        inputs, outputs: the floating-point tensors, in float64; of triax's own ops none.
        writers: indices of the ops that had written its inputs last.
    """

    name: str
    place: str
    repeat: int
    inputs: list[Tensor]
    outputs: list[Tensor]
    writers: list[int]


class FirstDifference(NamedTuple):
    """First place at which the ranks of an axis compute something else than one process.

    Attributes:
        text: the place in words.
        module: name of the module whose own code does it; "" if none does.
    """

    text: str
    module: str


LOSS = "loss_fn"  # the module of ops that the loss function calls


def record(model: PipelineModule, inputs: Any, fields: dict[str, Any]) -> list[ModuleCall]:
    """Run the forward pass of a model of one stage, and return the calls of its modules in the order of their ends."""
    calls: list[ModuleCall] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = [*tensors_of(list(args)), *tensors_of(list(kwargs.values()))]
        records = [_kept(tensor) for tensor in tensors], [_kept(tensor) for tensor in tensors_of(output)]
        calls.append(ModuleCall(names[module], type(module).__name__, _place(module), *records))

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
    return calls


def record_ops(model: PipelineModule, inputs: Any, labels: Any, fields: dict[str, Any], module: str) -> list[OpCall]:
    """Run the forward pass of a model of one stage, and return the ops of one module's code, or of ``LOSS``."""
    ops = _Ops()

    def toggle(*_: Any) -> None:
        ops.listens = not ops.listens

    handles = []
    if module != LOSS:
        called = model.get_submodule(module)
        handles = [called.register_forward_pre_hook(toggle), called.register_forward_hook(toggle)]
    try:
        with torch.no_grad(), ops:
            outputs = model.run_stage(0, inputs, fields)
            if module == LOSS:
                ops.listens = True
                model.loss(outputs, labels)
    finally:
        for handle in handles:
            handle.remove()
    return ops.found


class _Ops(TorchDispatchMode):
    """Notes ops while it listens, and which op wrote what another reads."""

    def __init__(self) -> None:
        super().__init__()
        self.listens = False
        self.found: list[OpCall] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._writer: dict[int, int] = {}  # by the address of a storage
        self._kept: list[Any] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and note it."""
        if not self.listens:
            return func(*args, **(kwargs or {}))
        name, line = str(func.overloadpacket), _line(sys._getframe(1))
        given = [*tensors_of(list(args)), *tensors_of(list((kwargs or {}).values()))]
        inputs = [_kept(tensor) for tensor in given if line and tensor.is_floating_point()]
        outputs = func(*args, **(kwargs or {}))
        made = list(tensors_of(outputs))
        values = [_kept(tensor) for tensor in made if line and tensor.is_floating_point()]
        writers = {self._writer[at] for tensor in given if (at := _storage(tensor)) in self._writer}
        self._writer.update((_storage(tensor), len(self.found)) for tensor in made)
        self._kept.append(made)
        self.found.append(OpCall(name, line, self._counts[line, name], inputs, values, sorted(writers)))
        self._counts[line, name] += 1
        return outputs


def first_difference(
    whole: Sequence[ModuleCall], ranks: Sequence[Sequence[ModuleCall]], rtol: float
) -> FirstDifference:
    """Return where the ranks of an axis first compute something else than one process; ("", "") if nowhere."""
    for at, one in enumerate(whole):
        calls = [records[at] if at < len(records) else None for records in ranks]
        if any(call is None or call.name != one.name for call in calls):
            return FirstDifference(f"the modules run in another order from {one.name} ({one.kind}) on", "")
        parts = [call for call in calls if call is not None]
        wrong = _first_wrong([call.outputs for call in parts], one.outputs, rtol)
        if wrong is None:
            continue
        where = f"{one.name} ({one.kind}{', ' + one.place if one.place else ''})"
        if _first_wrong([call.inputs for call in parts], one.inputs, rtol) is None:
            return FirstDifference(f"the output of {where} differs, and its input does not: {wrong}", one.name)
        owner = one.name.rpartition(".")[0]
        holder = next((call for call in whole[at:] if call.name == owner), None)
        inside = f"in the forward of {owner} ({holder.kind}, {holder.place})" if holder else "between two layers"
        before = next((call.name for call in reversed(whole[:at]) if call.name.rpartition(".")[0] == owner), "")
        after = f" after {before}" if before else ""
        text = f"the input of {where} differs, computed {inside}{after}: {wrong}"
        return FirstDifference(text, owner if holder else "")
    return FirstDifference("", "")


def first_op(whole: Sequence[OpCall], ranks: Sequence[Sequence[OpCall]], rtol: float) -> tuple[str, str]:
    """Return the op that first computes something else on the ranks of an axis with its line, and what causes it.

    Both are "" if no op does, and the cause if it is not known.

    A right shard may have values on the way that are neither whole, nor slices, nor summands, as the maximum of a
    shard before the maximum over the ranks. So an op counts only if what it wrote reaches the end through ops none of
    which is right.
    """
    one = {op[:3]: op for op in whole if op.place}
    calls = [{op[:3]: op for op in records} for records in ranks]

    def wrong(key: tuple[str, str, int]) -> str | None:
        """Return the difference of an op's outputs, "" if they are right, None if they cannot be compared."""
        parts = [calls_of_rank[key] for calls_of_rank in calls if key in calls_of_rank]
        if key not in one or len(parts) < len(calls) or not one[key].outputs:
            return None
        return _first_wrong([each.outputs for each in parts], one[key].outputs, rtol) or ""

    records = ranks[0]
    read = {writer for op in records for writer in op.writers}
    waiting, seen, wrong_ops = [at for at in range(len(records)) if at not in read], set(), []
    while waiting:
        if (at := waiting.pop()) in seen:
            continue
        seen.add(at)
        text = wrong(records[at][:3])
        if text:
            wrong_ops.append((at, text))
        if text != "":
            waiting.extend(records[at].writers)
    if not wrong_ops:
        return "", ""
    at, text = min(wrong_ops)
    call, inputs = records[at], [calls_of_rank[records[at][:3]].inputs for calls_of_rank in calls]
    right = _first_wrong(inputs, one[call[:3]].inputs, rtol) is None
    cause = (_cause if right else _multiple)(call, inputs, one[call[:3]].inputs, rtol)
    return f"{call.name} in {call.place}, {'whose input is right' if right else 'whose input differs'}: {text}", cause


# Names of ops that compute a number from several ones along a dim.
_REDUCTION = re.compile(r"(mean|sum|var|std|norm|softmax|logsumexp|sort|topk|\ba?(max|min))$")


def _cause(call: OpCall, parts: list[list[Tensor]], whole: list[Tensor], rtol: float) -> str:
    """Return what makes an op wrong whose inputs are right on each rank; "" if it is not known."""
    for index, one in enumerate(whole):
        values = [inputs[index] for inputs in parts]
        if all(_near(value, one, rtol) for value in values):
            continue
        if values[0].shape == one.shape and _near(torch.stack(values).sum(0), one, rtol):
            return "an input of the op is this rank's part of a sum over the ranks: sum it over the axis before the op"
        if _REDUCTION.search(call.name):
            return (
                f"{call.name} runs along a dim that is split among the ranks, so each rank has the result of its slice "
                "alone: combine the results over the axis"
            )
    return ""


def _multiple(call: OpCall, parts: list[list[Tensor]], whole: list[Tensor], rtol: float) -> str:
    """Return what makes an input wrong that is a multiple of the right one on each rank; "" if none is."""
    ranks = len(parts)
    if any(len(inputs) != len(whole) for inputs in parts):
        return ""
    for index, one in enumerate(whole):
        if all(_near(inputs[index], ranks * one, rtol) for inputs in parts) and bool(one.any()):
            return (
                f"an input of the op is {ranks} times one process's: it is summed over the {ranks} ranks once too often"
            )
    return ""


def _first_wrong(parts: list[list[Tensor]], whole: list[Tensor], rtol: float) -> str | None:
    """Return the first value that is neither whole, nor in slices, nor in summands; None if all are."""
    for index, one in enumerate(whole):
        values = [tensors[index] for tensors in parts if index < len(tensors)]
        if len(values) != len(parts):
            return f"{len(parts[0])} tensors, and {len(whole)} on one process"
        if not _fits(values, one, rtol):
            shapes = sorted({tuple(value.shape) for value in values})
            if shapes == [tuple(one.shape)]:
                off = [errors(value, one)[0] for value in values]
                worst = max(range(len(values)), key=lambda rank: float(off[rank].max()))
                at = tuple(int(i) for i in torch.unravel_index(off[worst].argmax(), one.shape))
                return f"{values[worst][at].item():.12g} at {at}, and on one process {one[at].item():.12g}"
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
    error, largest = errors(found, wanted)
    return bool((error <= rtol * largest + 1e-14).all())


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def _place(module: nn.Module) -> str:
    """Return file and line of a module's class, for classes outside of torch."""
    try:
        file, (_, line) = inspect.getsourcefile(type(module)), inspect.getsourcelines(type(module))
    except (OSError, TypeError):
        return ""
    return f"{Path(file or '').name}:{line}" if not type(module).__module__.startswith("torch.") else ""


def _line(frame: FrameType | None) -> str:
    """Return file and line of the innermost code outside of torch; "" if it is triax's own."""
    while frame is not None and _package(frame) == "torch":
        frame = frame.f_back
    if frame is None or _package(frame) == __name__.partition(".")[0]:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
