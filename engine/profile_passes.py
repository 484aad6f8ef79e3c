"""Counting and timing forward passes, module by module, by hooks that are there while somebody profiles."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..pipe.module import PipelineModule
from .profile_report import Entry


class Counter(FlopCounterMode):
    """Torch's counter, without its own notion of modules, and with the CPU's attention, which it does not know."""

    def __init__(self) -> None:
        fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
        super().__init__(display=False, custom_mapping=fused)
        self.mod_tracker = _Everything()  # type: ignore[assignment]

    @property
    def total(self) -> int:
        """Operations so far."""
        return sum(self.flop_counts["Global"].values())


class _Everything:
    """In place of torch's tracker of modules, which hooks into the backward pass too."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *args: object) -> None:
        return None


def _attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """softmax(q kᵀ) v: (B, heads, T, dim), (B, kv_heads, S, dim), (B, kv_heads, S, dim_v)."""
    batch, heads, rows, dim = q
    return int(2 * batch * heads * rows * k[2] * (dim + v[3]))


class Passes:
    """Forward passes of a module.

    Attributes:
        ignored: classes whose modules are not counted.
    """

    ignored: tuple[type[nn.Module], ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._counter: Counter | None = None
        self._timing = False
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.flops: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)
        self.called: set[str] = set()
        self._open: list[tuple[int, float]] = []
        self._skipped = 0

    @contextmanager
    def measured(self, flops: bool = True, seconds: bool = True) -> Iterator[None]:
        """Passes run within: count their operations, or their time, or both (with the counter's own time in it)."""
        counter = Counter() if flops else None
        self._counter, self._timing = counter, seconds
        try:
            with counter if counter is not None else nullcontext():
                yield
        finally:
            self._counter, self._timing = None, False
            self._open, self._skipped = [], 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within it every module is seen. Nothing is left on the model behind it."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                skip = isinstance(module, self.ignored)
                for handle in (
                    module.register_forward_pre_hook(partial(self._enter, name)),
                    module.register_forward_hook(partial(self._leave, name, skip), always_call=True),
                ):
                    stack.callback(handle.remove)
            if isinstance(self.model, PipelineModule):
                stack.callback(setattr, self.model, "around", self.model.around)
                self.model.around = partial(self._around, self.model.around)
            yield

    def _around(self, inner: Any, stage: int, layer: int, call: Callable[[Any], Any], x: Any) -> Any:
        """A layer of a list that runs through a function of its own (a tied head), which its hooks do not see."""
        with nullcontext() if isinstance(call, nn.Module) else self.within(f"layers.{layer}"):
            return call(x) if inner is None else inner(stage, layer, call, x)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """What runs within is that module's, though nobody calls the module."""
        self._enter(name)
        try:
            yield
        finally:
            self._leave(name, False)

    def entries(self, params: Callable[[Tensor], int] = torch.numel, counted: int = 1, timed: int = 1) -> list[Entry]:
        """What was measured, of each module.

        Args:
            params: how much a parameter counts.
            counted, timed: passes that were counted, and timed: the entries are of one.
        """
        seen: set[int] = set()
        found = []
        for name, module in self.model.named_modules():
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen.update(map(id, own))
            found.append(
                Entry(
                    name,
                    type(module).__name__,
                    sum(map(params, own)),
                    self.flops[name] / counted,
                    self.seconds[name] / timed,
                    name in self.called,
                )
            )
        return found

    def _now(self) -> tuple[int, float]:
        flops = 0 if self._counter is None else self._counter.total - self._skipped
        return flops, _clock(self.model) if self._timing else 0.0

    def _enter(self, name: str, *_: Any) -> None:
        if self._counter is not None or self._timing:
            self._open.append(self._now())

    def _leave(self, name: str, skip: bool, *_: Any) -> None:
        if not self._open:
            return
        flops, seconds = (after - before for after, before in zip(self._now(), self._open.pop()))
        if skip:
            self._skipped += int(flops)  # nor does what holds the module count it
            flops = 0
        self.called.add(name)
        self.flops[name] += int(flops)
        self.seconds[name] += seconds


def _clock(model: nn.Module) -> float:
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(parameter.device)
    return time.perf_counter()
