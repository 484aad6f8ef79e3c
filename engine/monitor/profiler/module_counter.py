"""Counter of the operations and the time of each module in forward passes, by hooks that are removed afterwards."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....pipe.module import PipelineModule
from .flop_counter import FlopCounter
from .tree_report import ModuleNode


class ModuleCounter:
    """Counts the FLOPs and measures the time of each module within a model, in the model's forward passes.

    Attributes:
        ignored: classes whose modules are not counted.
        flops, seconds: module name -> FLOPs and seconds of the module, including those of all modules in it.
        called: names of the modules that ran.
    """

    ignored: tuple[type[nn.Module], ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._counter: FlopCounter | None = None
        self._timing = False
        self.reset()

    def reset(self) -> None:
        """Set all counts and times to 0."""
        self.flops: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self.called: set[str] = set()
        self._open: list[tuple[int, float]] = []
        self._skipped = 0

    @contextmanager
    def measured(self, flops: bool = True, seconds: bool = True) -> Iterator[None]:
        """Context manager that counts the FLOPs and measures the time of each module's forward passes inside it.

        If both are measured, the times include the overhead of counting FLOPs.

        Args:
            flops: count floating-point operations.
            seconds: measure the time.
        """
        counter = FlopCounter() if flops else None
        self._counter, self._timing = counter, seconds
        try:
            with counter if counter is not None else nullcontext():
                yield
        finally:
            self._counter, self._timing = None, False
            self._open, self._skipped = [], 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which every module has hooks, which ``measured`` needs to tell the modules apart."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                skip = isinstance(module, self.ignored)
                for handle in (
                    module.register_forward_pre_hook(partial(self._enter, name)),
                    module.register_forward_hook(partial(self._leave, name, skip), always_call=True),
                ):
                    stack.callback(handle.remove)
            if isinstance(self.model, PipelineModule):
                stack.callback(setattr, self.model, "run_hook", self.model.run_hook)
                self.model.run_hook = partial(self._around, self.model.run_hook)
            yield

    def _around(self, inner: Any, stage: int, layer: int, call: Callable[[Any], Any], x: Any) -> Any:
        """Run one layer of a ``PipelineModule`` and count it.

        Hooks do not run for a layer that is a plain function, such as a tied head, so it is counted here.
        """
        with nullcontext() if isinstance(inspect.unwrap(call), nn.Module) else self.within(f"layers.{layer}"):
            return call(x) if inner is None else inner(stage, layer, call, x)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count what runs in this context as a call of the named module."""
        self._enter(name)
        try:
            yield
        finally:
            self._leave(name, False)

    def entries(self, params: Callable[[Tensor], int] = torch.numel, timed: int = 1) -> list[ModuleNode]:
        """Return an entry for each module with its FLOPs and seconds per forward pass.

        Args:
            params: function that returns the number of elements for which a parameter counts.
            timed: number of forward passes that were timed. FLOPs are those of one pass.
        """
        seen: set[int] = set()
        nodes = []
        for name, module in self.model.named_modules():
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen.update(map(id, own))
            nodes.append(
                ModuleNode(
                    name,
                    type(module).__name__,
                    sum(map(params, own)),
                    float(self.flops[name]),
                    self.seconds[name] / timed,
                    name in self.called,
                )
            )
        return nodes

    def _now(self) -> tuple[int, float]:
        flops = 0 if self._counter is None else self._counter.flops - self._skipped
        return flops, _clock(self.model) if self._timing else 0.0

    def _enter(self, name: str, *_: Any) -> None:
        if self._counter is not None or self._timing:
            self._open.append(self._now())

    def _leave(self, name: str, skip: bool, *_: Any) -> None:
        if not self._open:
            return
        flops, seconds = (after - before for after, before in zip(self._now(), self._open.pop()))
        if skip:
            self._skipped += int(flops)  # the modules that hold it do not count it either
            flops = 0
        self.called.add(name)
        self.flops[name] += int(flops)
        self.seconds[name] += seconds


def _clock(model: nn.Module) -> float:
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(parameter.device)
    return time.perf_counter()
