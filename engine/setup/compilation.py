"""torch.compile of a model's layers, each by itself ("regional compilation"), from ``options.compile``.

Only a layer's ``forward`` is compiled. All that surrounds it runs as without: stage 3's gathers, recomputation, hooks
and the reductions of gradients. Collectives inside a layer run between two of its graphs (base/uncompiled.py).

Schedules that split the backward (zero-bubble) get the gradients of compiled layers' weights together with the
gradients of the inputs, because a compiled backward pass is one graph.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...base.option_error import OptionError, refusal
from ...base.torch_private import compiler_backend, cpp_compilers, dispatch_modes, inductor_options
from ...grid import Grid
from ...options.compilation import Compile
from ...options.engine import EngineOptions
from ...pipe.backward import unsplit
from ...pipe.module import PipelineModule
from ...pipe.program.program import Program
from ...zero.modules.units import find_units


class Compilation:
    """Compiled layers of an engine, with counts of their graphs.

    Args:
        given: backend and arguments of torch.compile.
        grid: the engine's grid.
        layers: the layers and their names. Their ``forward`` is replaced.

    Attributes:
        layers: names of the compiled layers.
        graphs: number of graphs that were compiled so far.
        runs: number of graphs that were run so far.

    Raises:
        OptionError: on every rank, if a rank does not have what the backend needs, or there is nothing to compile.
    """

    def __init__(self, given: Compile, grid: Grid, layers: Sequence[tuple[str, nn.Module]]) -> None:
        problem = next((text for text in grid.world.all_gather_json(_missing(given.backend, grid)) if text), None)
        if problem is not None:
            raise OptionError("compile", reason=problem)
        self.layers = [name for name, _ in layers]
        self.graphs = self.runs = 0
        self._make = compiler_backend(given.backend)
        self._options: dict[str, Any] = {}
        kwargs = {key: value for key, value in given.kwargs.items() if key not in ("mode", "options")}
        if "mode" in given.kwargs or "options" in given.kwargs:
            mode, options = given.kwargs.get("mode"), given.kwargs.get("options") or {}
            modes = inductor_options(mode, given.kwargs.get("dynamic"))
            self._options = {"config_patches": {**modes, **options}}
        for name, layer in layers:
            forward = layer.forward
            if isinstance(forward, CompiledForward):  # by an engine that had the layer before
                forward = forward.function
            layer.forward = CompiledForward(self, name, forward, kwargs)

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile a graph, as torch.compile asks for it; return the function that runs it."""
        run = self._make(graph, inputs, **self._options)
        self.graphs += 1
        logging.getLogger("triax").info("compile: graph %d, of %d operations", self.graphs, len(graph.graph.nodes))

        def counted(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        return counted

    def __deepcopy__(self, memo: object) -> Compilation:
        return self


class CompiledForward:
    """Compiled ``forward`` of a layer, in training. Without gradients, and while a mode records operations, it is not.

    A layer that runs without a graph is reported: the compiler gives up on functions that it has to compile too often.

    Args:
        owner: counts the graphs.
        name: name of the layer, for messages.
        function: the layer's own ``forward``.
        kwargs: arguments of torch.compile.
    """

    def __init__(self, owner: Compilation, name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.function = function
        self._owner, self._name, self._kwargs = owner, name, kwargs
        self._compiled = torch.compile(function, backend=owner.backend, **kwargs)
        self._reported = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        recorded = dispatch_modes() > 0  # by record_memory or a profiler: graphs hide operations
        if recorded or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        before = self._owner.runs
        with unsplit():
            y = self._compiled(*args, **kwargs)
        if self._owner.runs == before and not self._reported:
            self._reported = True
            logging.getLogger("triax").warning(
                "compile: layer %s ran uncompiled: the compiler gave up on it, or found nothing to compile. Start with "
                "TORCH_LOGS=graph_breaks,recompiles to see why",
                self._name,
            )
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(self._owner, self._name, copy.deepcopy(self.function, memo), self._kwargs)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self.function,)  # what is pickled runs uncompiled


def compile_pipeline(module: PipelineModule, options: EngineOptions, program: Program) -> Compilation | None:
    """Compile the layers of this rank's stages that have parameters, if the options ask for it. Collective."""
    if options.compile is None:
        return None
    _require_whole_layers(options)
    layers = {name: layer for name, layer in module.layers.items() if next(layer.parameters(), None) is not None}
    if any(op.kind in "IW" for ops in program.ops for op in ops):
        _note(
            module.grid,
            f"{program.schedule.name} computes weight gradients apart from input gradients, but the backward pass "
            "of a compiled layer computes both at once: the schedule's W passes have nothing to do. Choose the "
            "schedule 1f1b, or leave compile out",
        )
    if options.zero.stage == 3 and options.precision.autocast is not None:
        _note(
            module.grid,
            options.say(
                "with <precision.autocast> a compiled layer may keep low-precision copies of its weights from forward "
                "to backward, which stage 3 is to save: set <precision.weights> to bf16 in its place"
            ),
        )
    return Compilation(options.compile, module.grid, [(f"layers.{name}", layer) for name, layer in layers.items()])


def compile_module(module: nn.Module, options: EngineOptions, grid: Grid) -> Compilation | None:
    """Compile the repeated blocks of a plain module, or all of it if it has none. Collective if asked for.

    The blocks are the same as for ZeRO stage 3 and for recomputation, which replace their ``forward`` after this. If
    all blocks are single layers, such as the entries of a small ``nn.Sequential``, and neither stage 3 nor
    recomputation needs them, the module is compiled as a whole.
    """
    if options.compile is None:
        return None
    _require_whole_layers(options)
    units = find_units(module)
    blocks = [(name, block) for name, block in units[1:] if not _holds(block, (other for _, other in units[1:]))]
    if not any([*block.children()] for _, block in blocks):
        as_one = not (options.recompute.asked or options.zero.stage == 3)
        blocks = [] if as_one else blocks
    else:
        blocks = [(name, block) for name, block in blocks if [*block.children()]]
    return Compilation(options.compile, grid, blocks or [(type(module).__name__, module)])


def _holds(module: nn.Module, others: Iterable[nn.Module]) -> bool:
    inside = {inner for inner in module.modules() if inner is not module}
    return any(other in inside for other in others)


def _require_whole_layers(options: EngineOptions) -> None:
    granularity = options.recompute.granularity
    if options.recompute.asked and granularity in ("selective", "matmul"):
        raise refusal(
            f"<compile> is on, and <recompute.granularity> is {granularity}, which recomputes parts of a layer; a "
            "compiled layer runs as a whole. Set <recompute.granularity> to full, or leave <compile> out",
        )


def _missing(backend: str, grid: Grid) -> str | None:
    """Return the reason for which this process cannot use a backend; None if it can."""
    if backend not in torch.compiler.list_backends(()):
        usual = ", ".join(sorted({*torch.compiler.list_backends(), "aot_eager", "eager"}))
        return f"there is no backend {backend}: give one of {usual}, or another one of torch.compiler.list_backends(())"
    if backend != "inductor":
        return None
    instead = "or set compile.backend to aot_eager, which compiles no kernels"
    if grid.device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            return f"the backend inductor needs triton on {grid.device}, which is not installed: install it, {instead}"
        return None
    compilers = cpp_compilers()
    if not any(shutil.which(name) for name in compilers):
        return (
            f"the backend inductor needs a C++ compiler on a CPU, and {' or '.join(compilers)} is not in the PATH: "
            f"install it (apt install g++), {instead}"
        )
    return None


def _note(grid: Grid, note: str) -> None:
    if grid.rank == 0:
        logging.getLogger("triax").warning("compile: %s", note)


def _itself(function: Any) -> Any:
    return function
