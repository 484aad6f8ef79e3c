"""The flops profiler: what each module of a model computes, holds and takes, in one forward pass.

Operations are counted by torch's ``FlopCounterMode``: matrix products, convolutions and attention, each
multiply-accumulate (MAC) as two; what is done element by element is not counted. Attention is counted whole, causal or
not. Reports have the form of DeepSpeed's flops profiler, and so have the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import units
from .profile_passes import Passes
from .profile_report import Node, aggregated, report, tree

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler:
    """Counts a module's forward passes between ``start_profile`` and ``stop_profile``.

    Args:
        model: any module.
        ds_engine: as DeepSpeed has it; an engine's own report is ``flops_profiler`` of its configuration.
        recompute_fwd_factor: for reports of an engine.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.passes = Passes(model)
        self._running = ExitStack()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Count and time from here on. Latencies are those under the counter, which takes its time at each operation.

        Args:
            ignore_list: classes whose modules are not counted.
        """
        self.stop_profile()
        self.reset_profile()
        self.passes.ignored = tuple(ignore_list or ())
        self._running.enter_context(self.passes.hooked())
        self._running.enter_context(self.passes.measured())

    def stop_profile(self) -> None:
        """Count no more; what was counted stays. Nothing is left on the module."""
        self._running.close()

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self.passes.reset()

    def end_profile(self) -> None:
        """Stop, and forget."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of the forward passes."""
        flops = self._root().flops
        return units.count(flops, "FLOPS") if as_string else round(flops)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the forward passes."""
        macs = self._root().flops / 2
        return units.count(macs, "MACs") if as_string else round(macs)

    def get_total_params(self, as_string: bool = False) -> Any:
        """The module's parameters."""
        params = self._root().params
        return units.count(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the forward passes."""
        seconds = self._root().seconds
        return units.duration(seconds) if as_string else seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print all of it.

        Args:
            profile_step: for the head.
            module_depth, top_modules, detailed, output_file: as ``flops_profiler`` in the configuration.
        """
        root = self._root()
        rows = [
            ("params:", units.count(root.params)),
            ("fwd MACs:", units.count(root.flops / 2, "MACs")),
            ("fwd flops:", units.count(root.flops)),
            ("fwd latency:", units.duration(root.seconds)),
            ("fwd FLOPS = fwd flops / fwd latency:", units.rate(root.flops, root.seconds)),
        ]
        show(report(profile_step, rows, root, module_depth, top_modules, detailed), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules that have, compute and take most, at each depth or at one."""
        print("\n".join(aggregated(self._root(), module_depth, top_modules)), flush=True)

    def _root(self) -> Node:
        return tree(self.passes.entries())


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-accumulates and parameters of a forward pass of any module.

    It runs ``warm_up`` times, then once timed and once counted: the counter does not slow what is timed.

    Args:
        model: the module.
        input_shape: of one float input of ones, in place of ``args`` and ``kwargs``.
        args, kwargs: the inputs.
        print_profile: print the report too.
        detailed, module_depth, top_modules, output_file: of the report, as in the configuration.
        warm_up: passes before.
        as_string: return ``"1.23 GMACs"`` in place of numbers.
        ignore_modules: classes whose modules are not counted.
        mode: ``forward``, or ``generate``: what to call.

    Returns:
        flops, macs, params.

    Raises:
        ValueError: neither inputs nor their shape, both, or another mode.
    """
    if (input_shape is None) == (not args and not kwargs):
        raise ValueError("get_model_profile takes input_shape=, or args= and kwargs=: give one of the two")
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode is 'forward' or 'generate', not {mode!r}")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = (torch.ones(input_shape, dtype=like.dtype, device=like.device),)
    call: Callable[..., Any] = model if mode == "forward" else model.generate  # type: ignore[assignment]
    profiler = FlopsProfiler(model)
    passes = profiler.passes
    passes.ignored = tuple(ignore_modules or ())
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    with passes.hooked():
        for counts in (False, True):
            with passes.measured(flops=counts, seconds=not counts):
                call(*args, **(kwargs or {}))
    if print_profile:
        profiler.print_model_profile(0, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def show(text: str, output_file: str | None) -> None:
    """Print it, or write it to a file, whose folder is made."""
    if output_file is None:
        print(text, flush=True)
        return
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
