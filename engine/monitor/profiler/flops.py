"""Flops profiler of any module: operations, parameters and time of each module in it, in one forward pass.

Matrix products, convolutions and attention count, a multiply-accumulate (MAC) as two operations. Elementwise operations
do not count. Attention counts as if it were not masked. Names follow the flops profilers of other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .. import format as units
from .module_counter import ModuleCounter
from .tree_report import ModuleNode, aggregated, publish, report, tree


class FlopsProfiler:
    """FLOPs, MACs, parameters and times of a module's forward passes.

    It counts between ``start_profile`` and ``stop_profile``.

    Args:
        model: any module.
        ds_engine, recompute_fwd_factor: for scripts of other libraries; without effect here. To profile a step of an
            engine, set the option ``monitor.profile``.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.passes = ModuleCounter(model)
        self._running = ExitStack()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start to count and time. The counter slows down each operation, and latencies include that.

        Args:
            ignore_list: classes whose modules are not counted.
        """
        self.stop_profile()
        self.reset_profile()
        self.passes.ignored = tuple(ignore_list or ())
        self._running.enter_context(self.passes.hooked())
        self._running.enter_context(self.passes.measured())

    def stop_profile(self) -> None:
        """Stop counting and remove the hooks. The counts stay."""
        self._running.close()

    def reset_profile(self) -> None:
        """Reset all counts to 0."""
        self.passes.reset()

    def end_profile(self) -> None:
        """Stop counting and reset all counts."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the floating-point operations of the forward passes."""
        flops = self._root().flops
        return units.count(flops, "FLOPS") if as_string else round(flops)

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulates of the forward passes."""
        macs = self._root().flops / 2
        return units.count(macs, "MACs") if as_string else round(macs)

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of the module's parameters."""
        params = self._root().params
        return units.count(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the forward passes."""
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
        """Print the report.

        Args:
            profile_step: the number of the step in the report's head.
            module_depth, top_modules, detailed, output_file: as ``depth``, ``top_modules``, ``detailed``, ``file`` of
                ``Profile``.
        """
        root = self._root()
        rows = [
            ("params:", units.count(root.params)),
            ("fwd MACs:", units.count(root.flops / 2, "MACs")),
            ("fwd flops:", units.count(root.flops)),
            ("fwd latency:", units.duration(root.seconds)),
            ("fwd FLOPS = fwd flops / fwd latency:", units.rate(root.flops, root.seconds)),
        ]
        publish(report(profile_step, rows, root, module_depth, top_modules, detailed), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print, for each depth up to ``module_depth``, the classes with the most parameters, MACs and time."""
        print("\n".join(aggregated(self._root(), module_depth, top_modules)), flush=True)

    def _root(self) -> ModuleNode:
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
    """Profile a forward pass of any module.

    The module runs ``warm_up`` times, then once for the time and once for the operations, so that the counter does not
    slow down the pass that is timed.

    Args:
        model: the module.
        input_shape: shape of one input of ones, in place of ``args`` and ``kwargs``.
        args, kwargs: the inputs.
        print_profile: print the report too.
        detailed, module_depth, top_modules, output_file: as ``detailed``, ``depth``, ``top_modules`` and ``file`` of
            ``Profile``.
        warm_up: forward passes before the measurement.
        as_string: return texts such as ``"1.23 GMACs"`` in place of numbers.
        ignore_modules: classes whose modules are not counted.
        mode: ``forward`` or ``generate``, the method to call.

    Returns:
        flops, macs, params.

    Raises:
        ValueError: both or neither of inputs and their shape are given, or the mode is not known.
    """
    if (input_shape is None) == (not args and not kwargs):
        raise ValueError("Give either input_shape, or args and kwargs, to get_model_profile.")
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode is {mode!r}, but it must be 'forward' or 'generate'.")
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
