"""Recording of one step: what each layer, module and, on request, op returns in the forward pass, and the gradients.

Module hooks see the modules, ``PipelineModule.layer_hook`` the entries of the list, functions too, and a dispatch mode
the ops. The gradient of a module's input is that through this module alone: its hook stands on an alias of the input,
so that a residual connection beside the module does not count.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.nest import map_tensors, tensors_of
from ..pipe.module import PipelineModule
from ..pipe.program.ops import Op

_TORCH = str(Path(torch.__file__).parent)
COLLECTIVE = "c10d."
_UNSEEN = ("aten.detach", "aten.view", "aten.alias", "aten.t.", "aten.transpose")  # other views of the same values
_HERE = str(Path(__file__).parent)


@dataclass
class Record:
    """One call of a layer, a module or an op.

    Attributes:
        microbatch: its number in the global batch.
        layer: index in the list of layers; the number of layers for ``loss_fn``.
        kind: ``layer``, ``module`` or ``op``.
        name: whole-model name of the layer or module, or of the module that ran the op.
        what: class of the module, name of the function or of the op.
        call: number of earlier calls with this name in the layer.
        place: file and line of the user's code.
        inputs, outputs: floating-point tensors.
        input_gradients, gradients: their gradients; None where none came.
    """

    microbatch: int
    layer: int
    kind: str
    name: str
    what: str
    call: int = 0
    place: str = ""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)


class Recorder:
    """Recorder of the forward passes of a pipeline's training step.

    Args:
        module: the model.
        first: number of this replica's first microbatch in the global batch.
        script: the user's script, whose lines are named first.
        ops: record the ops of this microbatch; -1: of none.

    Attributes:
        records: the calls of this rank, in the order of their ends.
        losses: microbatch -> what ``loss_fn`` returned, as tensors.
        active: True while a training step runs.
    """

    def __init__(self, module: PipelineModule, first: int, script: str, ops: int = -1) -> None:
        self.records: list[Record] = []
        self.losses: dict[int, list[Tensor]] = {}
        self.active = False
        self._module, self._first, self._script, self._ops = module, first, script, ops
        self._waiting: list[Record] = []  # of the layer that runs now
        self._running: list[str] = []
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._microbatch: int | None = None
        for _, name, layer in module.named_layers():
            for inner, part in layer.named_modules():
                if name != "loss_fn" or inner:
                    self._hook(f"{name}.{inner}".rstrip("."), part)
        module.layer_hook = self._layer
        if module.is_last:
            self._wrap_loss()

    @contextmanager
    def forward(self, op: Op) -> Iterator[None]:
        """Return the context of a forward op of the executor."""
        if not self.active:
            yield
            return
        self._microbatch = self._first + op.microbatch
        try:
            if self._microbatch == self._ops:
                with _Ops(self) as ops:
                    yield
                ops.settle()
            else:
                yield
        finally:
            self._flush(len(self._module.layer_specs))
            self._copies.clear()
            self._microbatch = None

    def add_op(self, name: str, outputs: list[Tensor]) -> Record:
        """Record an op of the module that runs now, and return the record."""
        within = self._running[-1] if self._running else ""
        record = Record(self._microbatch or 0, -1, "op", within, name, place=self._place())
        record.outputs = [each.detach().clone() for each in outputs]
        self._waiting.append(record)
        return record

    # ------------------------------------------------------------------------------------------ hooks

    def _hook(self, name: str, part: nn.Module) -> None:
        stack: list[Record] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._microbatch is None:
                return None
            record = Record(self._microbatch, -1, "module", name, type(module).__name__, place=_definition(module))
            stack.append(record)
            self._running.append(name)

            def alias(tensor: Tensor) -> Tensor:
                if not tensor.is_floating_point():
                    return tensor
                record.inputs.append(self._copy(tensor))
                record.input_gradients.append(None)
                if not (tensor.requires_grad and torch.is_grad_enabled()):
                    return tensor
                seen = tensor.view_as(tensor)
                seen.register_hook(functools.partial(_keep, record.input_gradients, len(record.inputs) - 1))
                return seen

            return map_tensors(alias, args, exact=True), map_tensors(alias, kwargs, exact=True)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._microbatch is None or not stack:
                return
            record = stack.pop()
            self._running.pop()
            self._note(record, output)

        part.register_forward_pre_hook(before, with_kwargs=True)
        part.register_forward_hook(after)

    def _layer(self, index: int, value: Any) -> None:
        if self._microbatch is None:
            return
        spec = self._module.layer_specs[index]
        what = getattr(spec, "typename", None) or getattr(spec, "__name__", type(spec).__name__)
        self._note(Record(self._microbatch, index, "layer", f"layers.{index}", what, place=_definition(spec)), value)
        self._flush(index)

    def _wrap_loss(self) -> None:
        """Record what ``loss_fn`` gets and returns. An object keeps its class's attributes and further methods."""
        loss_fn, layers = self._module.loss_fn, len(self._module.layer_specs)
        if loss_fn is None:
            return

        def seen(value: Any, inputs: Any) -> Any:
            if self._microbatch is not None:
                what = getattr(loss_fn, "__name__", type(loss_fn).__name__)
                record = Record(self._microbatch, layers, "layer", "loss_fn", what, place=_definition(loss_fn))
                record.inputs = [self._copy(each) for each in _floats(inputs)]
                record.input_gradients = [None] * len(record.inputs)
                self._note(record, _terms(value))
                self.losses[self._microbatch] = record.outputs
            return value

        if isinstance(loss_fn, nn.Module):
            loss_fn.register_forward_hook(lambda module, args, value: seen(value, args))
        elif callable(getattr(loss_fn, "of_head", None)):
            kind = type(loss_fn)

            def call(self: Any, outputs: Any, labels: Any) -> Any:
                return seen(kind.__call__(self, outputs, labels), outputs)

            def of_head(self: Any, head: Any, x: Any, labels: Any) -> Any:
                return seen(kind.of_head(self, head, x, labels), x)

            recorded = copy.copy(loss_fn)
            made = type(kind.__name__, (kind,), {"__call__": call, "of_head": of_head})
            object.__setattr__(recorded, "__class__", made)
            self._module.loss_fn = recorded
        else:
            wrapped: Callable[..., Any] = _Loss(loss_fn, lambda outputs, value: seen(value, outputs))
            self._module.loss_fn = wrapped

    # ---------------------------------------------------------------------------------------- helpers

    def _note(self, record: Record, value: Any) -> None:
        for tensor in _floats(value):
            record.outputs.append(self._copy(tensor))
            record.gradients.append(None)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(functools.partial(_keep, record.gradients, len(record.outputs) - 1))
        self._waiting.append(record)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor's values; the same one for the same tensor, unless it was changed."""
        known = self._copies.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != tensor._version:
            known = tensor, tensor._version, tensor.detach().clone()
            self._copies[id(tensor)] = known
        return known[2]

    def _flush(self, layer: int) -> None:
        calls: dict[tuple[str, str], int] = {}
        for record in self._waiting:
            record.layer = layer if record.layer < 0 else record.layer
            key = record.kind, record.name
            record.call = calls.get(key, 0)
            calls[key] = record.call + 1
        self.records += self._waiting
        self._waiting = []

    def _place(self) -> str:
        """Return file and line of the call: of the user's script if it is on the stack, else outside torch."""
        frame, found = sys._getframe(2), ""
        while frame is not None:
            file = frame.f_code.co_filename
            if file == self._script:
                return f"{Path(file).name}:{frame.f_lineno}"
            if not found and not file.startswith((_TORCH, _HERE, "<")):
                found = f"{Path(file).parent.name}/{Path(file).name}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return found


class _Loss:
    """A loss function whose calls are reported; other attributes are the function's own."""

    def __init__(self, loss_fn: Callable[..., Any], seen: Callable[[Any, Any], Any]) -> None:
        self._loss_fn, self._seen = loss_fn, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loss_fn"], name)

    def __call__(self, outputs: Any, labels: Any) -> Any:
        return self._seen(outputs, self._loss_fn(outputs, labels))


class _Ops(TorchDispatchMode):
    """Dispatch mode that reports the floating-point results of each op."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._pending: tuple[Record, list[Tensor]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        result, name = func(*args, **(kwargs or {})), str(func)
        if not name.startswith(_UNSEEN) and (found := _floats(args if name.startswith(COLLECTIVE) else result)):
            record = self._recorder.add_op(name, found)
            if name.startswith(COLLECTIVE):
                self._pending = record, found
        return result

    def settle(self) -> None:
        """Take the values of a collective, which its caller has waited for when it runs the next op."""
        if self._pending is not None:
            record, tensors = self._pending
            record.outputs = [each.detach().clone() for each in tensors]
            self._pending = None


def _keep(into: list[Tensor | None], at: int, gradient: Tensor) -> None:
    before = into[at]
    into[at] = gradient.detach().clone() if before is None else before + gradient


def _floats(value: Any) -> list[Tensor]:
    return [each for each in tensors_of(value) if each.is_floating_point()]


def _terms(value: Any) -> Any:
    """Return the tensors of a loss: of a mean, of a pair, of named terms."""
    return getattr(value, "terms", value)


def _definition(thing: Any) -> str:
    """Return file and line of the function that a layer or a loss runs."""
    cls = getattr(thing, "cls", None)  # of a LayerSpec
    target = cls if cls is not None else thing if hasattr(thing, "__code__") else type(thing)
    code = getattr(getattr(target, "forward", None) or vars(type(thing)).get("__call__"), "__code__", None)
    code = getattr(target, "__code__", code)
    if code is None or code.co_filename.startswith(_TORCH):
        return ""
    path = Path(code.co_filename)
    return f"{path.name}:{code.co_firstlineno}"
