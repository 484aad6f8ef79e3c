"""PipelineModule: a model as a list of layers. Each rank builds the layers of its stages only."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, groupby, pairwise
from types import NoneType
from typing import Any, NamedTuple, Never

import torch
from torch import nn

from ..base.accelerators import move_module
from ..base.checks import check_count, check_kind, check_seed
from ..base.checksum import checksum
from ..base.entry_points import offered
from ..base.html import html_table
from ..grid import Axis, Grid, Layout, layout_of
from ..grid.auxiliary import AuxiliaryLosses
from ..grid.layout import require_plain
from ..grid.loss_terms import NamedLosses, WithLoss, is_named, named_losses
from ..grid.randomness.random import DropoutState
from .chunked_loss import LastLayer
from .layer_builder import LayerBuilder, broadcast
from .partition import SEARCHED, boundaries
from .placeholders import Put
from .program.layer_costs import LayerCosts
from .program.placement import place
from .recompute.recompute import Recompute
from .spec import LayerSpec, TiedLayerSpec, require_arguments
from .stage_layers import StageLayers
from .ties import Layer, Tie, find_ties, sources, typename

_OLDER = "triax.pipeline_arguments"  # the entry points of modules that translate older arguments of PipelineModule
_ONE = "A layer takes what the layer before returned as one argument: write forward(self, x), and take x apart there"


class LocalParameter(NamedTuple):
    """A parameter that this rank holds, with what the data axis needs to place it in a bucket.

    Attributes:
        parameter: the parameter; a shard of it, if a tensor axis shards it.
        layout: its name and shape in the whole model.
        stages: the stages of this rank that use it.
        layers: the layers that use it, each by its first index in the list.
        tie: index into ``PipelineModule.ties`` if other ranks hold it too; None otherwise.
        counted: True on the one rank of the pipe axis that counts it (in norms, in checkpoints).
    """

    parameter: nn.Parameter
    layout: Layout
    stages: tuple[int, ...]
    layers: tuple[int, ...]
    tie: int | None
    counted: bool


class LayerCall(NamedTuple):
    """One entry of a stage's list, as ``run_stage`` calls it.

    Attributes:
        layer: the layer's first index in the list.
        key: the layer's key in ``PipelineModule.layers``; None for a plain function.
        function: function that is called as ``function(layer, x)``, or as ``function(x)`` without a key. If None, the
            layer itself is called, ``layer(x)``.
        takes: names of the fields of the microbatch that are its keyword arguments.
    """

    layer: int
    key: str | None
    function: Any
    takes: tuple[str, ...] = ()

    def bind(self, layers: nn.ModuleDict) -> Callable[..., Any]:
        """Return what is called with the value, given this rank's layers by key."""
        if self.key is None:
            return self.function
        return layers[self.key] if self.function is None else partial(self.function, layers[self.key])


class PipelineModule(nn.Module):
    """A model as a list of layers, cut into stages along the pipe axis. ``triax.Engine`` trains it.

    >>> layers = [triax.LayerSpec(nn.Linear, 4, 8), torch.relu, triax.LayerSpec(nn.Linear, 8, 2)]
    >>> model = triax.PipelineModule(layers, loss_fn=nn.functional.cross_entropy)
    >>> model(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    >>> [name for name, _ in model.named_parameters()]
    ['layers.0.weight', 'layers.0.bias', 'layers.2.weight', 'layers.2.bias']

    Each layer is called with one argument, the output of the layer before, and with the fields of the microbatch that
    its ``LayerSpec`` takes. A rank builds only the layers of its own stages. The initial weights of a layer depend on
    ``seed`` and on the layer's index in the list alone, so they are bitwise equal on every grid. Parameters have
    whole-model names: ``layers.3.up.weight`` belongs to the fourth entry of the list, on every rank that runs it.

    Tied layers: a module that is listed twice is one layer, and so are the ``TiedLayerSpec`` s of one key. Each rank
    that runs the layer builds it once, with the same weights. A parameter that two listed modules share is tied too.
    (``[LayerSpec(...)] * 4`` is four layers.)

    On a grid without a pipe axis the model is called as any module, ``model(x)``. The other methods of this class are
    for engines. The methods of ``nn.Module`` act on this rank's layers.

    Args:
        layers: ``LayerSpec`` s, ``nn.Module`` s, and functions of one argument. Modules that are already built
            take rank 0's weights, as in DDP.
        grid: the grid of ranks; by default ``Grid()``: every process a replica.
        loss_fn: ``loss_fn(outputs, labels)`` returns a mean (all microbatches then have the same weight), or a pair
            ``(sum, weight)`` that the engine divides once, over the whole batch; or several named ones, as a
            ``triax.Loss`` or a dict. None: the last layer returns the loss.
            For a model with auxiliary losses (``triax.moe``), a loss function that returns pairs needs a method
            ``weight(labels)``, which returns the weight before the loss is computed. If it is an ``nn.Module``, it
            belongs to the last stage, and its parameters (``loss_fn.log_sigma``) are trained with the layers'.
        partition: how to cut the list into stages: ``"parameters"`` (the default: the largest stage has as few
            parameters as possible), ``"uniform"``, ``"type:REGEX"``, or boundaries such as ``[0, 8, 16, 23, 30]``.
            With ``costs``, ``triax.Engine`` cuts for its schedule and microbatches: ``"time"`` makes the step as short
            as possible, ``"memory"`` makes the peak of the fullest rank as small as possible, and ``"auto"`` is
            ``"time"`` with the best schedule and chunks.
        costs: seconds and bytes of each layer, as ``triax.measure_layers`` returns them, equal on all ranks.
        chunks: stages per rank of the pipe axis. None: the list of ranks in ``placement``, or of boundaries in
            ``partition``, gives the number; without such a list, ``triax.Engine`` takes the schedule's number.
        placement: the rank of each stage: ``"loop"`` (0 1 2 0 1 2), ``"v"`` (0 1 2 2 1 0), or a list. The engine moves
            stages to the ranks that its schedule asks for; the right placement here only saves building them twice.
        seed: seed of the initial weights; by default 0. (``EngineOptions.seed`` is for data order and dropout.)
        dtype: dtype of the parameters; None leaves what the layers make.
        device: ``"meta"`` builds placeholders (NaN). ``triax.Engine``, or ``fill``, then builds one layer after
            the other, bitwise the same, so that in stage 3 of ZeRO no rank holds more than its shard and one layer.
        activation_checkpoint_interval: recompute groups of this many layers of a stage in the backward pass, instead
            of keeping their activations; 0: none. The configuration's ``activation_checkpointing`` has more options.
        checkpointable_layers: the classes of layers to recompute; by default all.
        output_fn: applied to the last layer's output when ``eval_batch`` returns outputs, e.g. to gather a sharded
            vocabulary.
        others: older arguments that an adapter translates, with a warning. Type checkers refuse them.

    Attributes:
        grid_is_default: True if no grid was given.
        partition: how the list is cut, as given; once an engine has searched for the cut, its boundaries.
        chunks_follow: True if no argument gives the number of chunks, so that the schedule sets it.
        boundaries: stage ``s`` has the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.
        placement: the rank of each stage.
        layers: the modules of this rank's stages, by their first index in the list.
        ties, tie_axes: the weights that several stages hold, and for each the axis of the ranks that hold it.
        auxiliary: state of the auxiliary losses, which the layers share with the engine.
        run_hook: if set, layers are called as ``run_hook(stage, layer, call, x)`` instead of ``call(x)``. ZeRO-3
            gathers weights there.
        check_hook: if set, called with each value that passes from one layer to the next.
        prefetch_hook: if set, called with the layers that a recomputation will run. ZeRO-3 starts to gather them.
        stage_part: returns the context of the part ``stage``, for layers that the loss function runs.
        training_started: set by the engine, whose optimizer changes weights without their version counters.

    Raises:
        ValueError: the list cannot be cut like this; the message says how it can.
        TypeError: an unknown argument, or one of another type.
    """

    placement: tuple[int, ...]
    chunks: int
    boundaries: list[int]
    loss_fn: Any
    _placed_loss: Any

    def __init__(
        self,
        layers: Iterable[Layer],
        grid: Grid | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        partition: str | Sequence[int] | None = None,
        *,
        costs: LayerCosts | None = None,
        chunks: int | None = None,
        placement: str | Sequence[int] = "loop",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        output_fn: Callable[[Any], Any] | None = None,
        activation_checkpoint_interval: int = 0,
        checkpointable_layers: Sequence[str] | None = None,
        **others: Never,
    ) -> None:
        super().__init__()
        call = "PipelineModule"
        if others:
            grid, partition, seed = _native(grid, partition, seed, others)
        check_kind(call, Iterable, "a list of LayerSpec, modules and functions", layers=layers)
        check_kind(call, (Callable, NoneType), "a function", loss_fn=loss_fn, output_fn=output_fn)  # type: ignore[arg-type]
        check_kind(call, (torch.dtype, NoneType), "a dtype, as torch.float32", dtype=dtype)
        kinds = (list, tuple, set, frozenset, NoneType)
        check_kind(call, kinds, "a list of names of classes", checkpointable_layers=checkpointable_layers)
        check_kind(call, (Iterable, NoneType), "a name or a list", partition=partition)
        check_kind(call, Iterable, "a name or a list", placement=placement)
        check_kind(call, (LayerCosts, NoneType), "triax.LayerCosts", costs=costs)
        check_count(call, chunks=1 if chunks is None else chunks)
        check_count(call, 0, activation_checkpoint_interval=activation_checkpoint_interval)
        if device is not None and str(device).partition(":")[0] != "meta":
            raise ValueError(
                f"device={str(device)!r} is not possible, because layers are built on the grid's device: leave device "
                "out, or pass device='meta' to build them later"
            )
        if grid is not None and not isinstance(grid, Grid):
            raise TypeError(f"grid is {grid!r}, not a triax.Grid: pass grid=triax.Grid(pipe={grid!r})")
        self.seed = check_seed(0 if seed is None else seed)
        self.partition = "parameters" if partition is None else partition
        self.grid_is_default = grid is None
        self.grid = Grid() if grid is None else grid
        known = chunks if chunks is not None else _known_chunks(placement, self.partition, self.grid.pipe.size)
        self.chunks_follow = known is None
        # A module is known to ``parameters()`` on the rank of the last stage only: see ``_place_loss``.
        self.__dict__["loss_fn"] = loss_fn
        self.output_fn = output_fn
        self.dtype = dtype
        self.dropout_state = DropoutState(self.seed)
        self.auxiliary = AuxiliaryLosses()
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = checkpointable_layers
        self.recompute = Recompute(
            self.grid, self.dropout_state, activation_checkpoint_interval, layers=checkpointable_layers
        )
        # Set by the engine.
        self.run_hook: Callable[[int, int, Callable[[Any], Any], Any], Any] | None = None
        self.prefetch_hook: Callable[[Sequence[int]], None] | None = None
        self.check_hook: Callable[[Any], object] | None = None
        self.stage_part: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.training_started = False
        # The whole model: its list, cut into stages, and the weights that are tied.
        self._list = list(layers)
        for index, entry in enumerate([*self._list, loss_fn]):
            if isinstance(entry, nn.Module):
                what = f"layer {index} ({typename(entry)})" if index < len(self._list) else "loss_fn"
                require_plain(chain(entry.named_parameters(), entry.named_buffers()), what)
        _check_costs(costs, self.partition, len(self._list))
        self.costs = costs
        self._sources = sources(self._list)
        self._builder = LayerBuilder(self._list, self.grid, self.seed, dtype)
        self._cut(placement, 1 if known is None else known)
        for source, entry in enumerate([*self._list, loss_fn]):
            if isinstance(entry, nn.Module) and (source == len(self._list) or self._sources[source] == source):
                broadcast(entry, self.grid)
        # The layers of this rank's stages.
        self._held = StageLayers(self._builder, device is not None, self.dropout_state, self.auxiliary)
        self.layers, self._placeholders = self._held.modules, self._held.placeholders
        self._build()

    @property
    def layer_specs(self) -> list[Layer]:
        """List of layers of the whole model, as it was given, including the layers of other ranks."""
        return list(self._list)

    @property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.placement) if rank == self.grid.pipe.rank]

    @property
    def is_first(self) -> bool:
        """True if this rank holds the first stage, which reads the inputs."""
        return self.placement[0] == self.grid.pipe.rank

    @property
    def is_last(self) -> bool:
        """True if this rank holds the last stage, which reads the labels."""
        return self.placement[-1] == self.grid.pipe.rank

    @property
    def has_placeholders(self) -> bool:
        """True if weights of this rank are placeholders still (``device="meta"``, before ``fill``)."""
        return bool(self._placeholders)

    def fill(self, put: Put | None = None) -> None:
        """Build the layers of a model of ``device="meta"``, one after the other. Does nothing for other models.

        Args:
            put: called as ``put(parameter, value)`` with each placeholder and its initial value; returns True if it
                stored the value elsewhere (ZeRO-3 keeps only a shard of it). If it returns False, or is None, the
                parameter takes the value.

        Raises:
            RuntimeError: ``put`` is None, and a placeholder was given values before (``require_untouched``).
        """
        if put is None:
            self.require_untouched()
        self._held.fill(put or (lambda parameter, value: False))
        if put is None:
            self._record_checksums()

    def require_untouched(self) -> None:
        """Check that no placeholder was given values, which ``fill`` would overwrite.

        Raises:
            RuntimeError: a placeholder was given values; the message names it.
        """
        name = self._placeholders.changed(self.parameters())
        if name is not None:
            raise RuntimeError(
                f"{name} was changed while it was a placeholder (device='meta'), and its new values would be lost: "
                "call model.fill() before you change weights, or leave out device='meta'"
            )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Read by ``DistributedDataParallel`` when it takes a module: it can take the whole model only.

        Raises:
            TypeError: the grid has stages or tensor shards.
        """
        if self.grid.data.size == self.grid.size:
            return []
        raise TypeError(
            f"DistributedDataParallel and accelerate's prepare cannot take a PipelineModule on {self.grid}: its ranks "
            "have other parts of the model. Give it to triax.Engine, which adds up the replicas' gradients."
        )

    def run_stage(
        self,
        stage: int,
        x: Any,
        fields: Mapping[str, Any] | None = None,
        losses: list[NamedLosses] | None = None,
        without_head: bool = False,
    ) -> Any:
        """Run the layers of one of this rank's stages.

        Args:
            stage: the stage.
            x: its input.
            fields: name -> value of each field of the microbatch that its layers take.
            losses: list to which the losses of layers that return ``WithLoss`` are appended; None: they are dropped.
            without_head: run all layers but the last one.
        """
        if self._placeholders:
            raise RuntimeError(
                "the model's weights are placeholders without values, because it was built with device='meta': call "
                "model.fill(), or make an engine of the model"
            )
        count = len(self._calls[stage]) - without_head
        for group in self.recompute.groups(self, stage):
            if group.start >= count:
                continue
            run = partial(self._run_layers, stage, group.start, min(group.stop, count), fields or {})
            prefetch = partial(self.prefetch_hook, group.layers) if self.prefetch_hook is not None else None
            x, layer_losses = self.recompute.run(group, run, x, prefetch=prefetch) if group.recomputed else run(x)
            if losses is not None:
                losses += layer_losses
        return x

    def _run_layers(
        self, stage: int, start: int, stop: int, fields: Mapping[str, Any], x: Any
    ) -> tuple[Any, list[NamedLosses]]:
        """Run the layers ``start`` to ``stop`` of a stage; return their output, and the losses that they returned."""
        layers, hook, check, losses = self.layers, self.run_hook, self.check_hook, list[NamedLosses]()
        for number, entry in enumerate(self._calls[stage][start:stop], start):
            index, key, _, takes = entry
            if check is not None and (stage or number):
                check(x)
            if missing := [name for name in takes if name not in fields]:
                raise ValueError(
                    f"{self._describe(index)} takes the field {missing[0]!r} of a microbatch, which was not given: "
                    f"call model(x, {missing[0]}=...), or engine.train_batch or engine.eval_batch"
                )
            own = {name: fields[name] for name in takes}
            call = entry.bind(layers)
            try:
                if key is None or hook is None:
                    x = self._run_layer(index, call, own, x)
                else:
                    run: Any = partial(self._run_layer, index, call, own)
                    run.__wrapped__ = call  # hooks look whether it is a module
                    x = hook(stage, index, run, x)
            except TypeError:
                require_arguments(call, (x,), f"{self._describe(index)} of stage {stage}", _ONE, own)
                raise
            if isinstance(x, WithLoss):
                x, loss = x
                losses.append(loss)
        return x, losses

    def _run_layer(self, index: int, call: Callable[..., Any], fields: Mapping[str, Any], x: Any) -> Any:
        """Return a layer's output. Check losses beside it, and make them a nest of tensors, which hooks need."""
        value = call(x, **fields) if fields else call(x)
        if not isinstance(value, WithLoss):
            return value
        where = self._describe(index)
        if not is_named(value.loss):
            raise ValueError(
                f"{where} returned WithLoss(value, loss) with a {type(value.loss).__name__} as loss: return a dict or "
                "triax.Loss of terms"
            )
        return WithLoss(value.value, named_losses(value.loss, f"{where} returned", "return"))

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows: a row for each stage, with the parameters of its whole layers."""
        names, rows = [typename(layer) for layer in self._list], []
        try:
            counts = self._builder.parameter_counts()
        except ValueError:  # a layer needs values to be built
            counts = []
        for stage, (start, stop) in enumerate(pairwise(self.boundaries)):
            runs = ((name, len(list(group))) for name, group in groupby(names[start:stop]))
            layers = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs)
            first = {self._sources[i] for i in range(start, stop)}  # a layer that is listed twice counts once
            parameters = f"{sum(int(counts[i]) for i in first):,}" if counts else "unknown"
            rows.append((stage, self.placement[stage], f"{start}-{stop - 1}: {layers}", parameters))
        return html_table(f"{len(names)} layers", ("stage", "rank of the pipe axis", "layers", "parameters"), rows)

    def _describe(self, index: int) -> str:
        return f"layer {index} ({typename(self._list[index])})"

    @property
    def loss_takes_head(self) -> bool:
        """True if the loss function runs the last layer, in chunks of tokens (``chunked_loss.py``)."""
        takes = getattr(self.loss_fn, "takes_head", None)
        if takes is None or self.has_loss_module:
            return False
        _, key, function, fields = self._calls[len(self.placement) - 1][-1]
        return not fields and bool(takes(None if key is None else self.layers[key], function))

    def loss(self, outputs: Any, labels: Any, with_head: bool = False) -> Any:
        """Return what ``loss_fn`` returns for a microbatch; without a ``loss_fn`` the outputs, which are the loss.

        Args:
            outputs: the last layer's output; ``with_head``: its input.
            labels: the microbatch's labels.
            with_head: let the loss function run the last layer.
        """
        if self.loss_fn is None:
            return outputs
        stage, loss_fn, hook = len(self.placement) - 1, self.loss_fn, self.run_hook
        if with_head:
            entry = self._calls[stage][-1]
            layer = None if entry.key is None else self.layers[entry.key]
            head = LastLayer(entry.bind(self.layers), layer, self.stage_part)

            def run(x: Any) -> Any:
                return _as_nest(loss_fn.of_head(head, x, labels))

            return run(outputs) if layer is None or hook is None else hook(stage, entry.layer, run, outputs)
        if hook is None or not self.has_loss_module:
            return loss_fn(outputs, labels)
        return hook(stage, len(self._list), lambda outputs: _as_nest(loss_fn(outputs, labels)), outputs)

    @contextmanager
    def other_loss(self, loss_fn: Callable[[Any, Any], Any]) -> Iterator[None]:
        """Context in which evaluations use another loss function, which has no parameters."""
        own, placed = self.loss_fn, self._modules.pop("loss_fn", None)
        self.__dict__["loss_fn"] = loss_fn
        try:
            yield
        finally:
            if placed is None:
                self.__dict__["loss_fn"] = own
            else:
                del self.__dict__["loss_fn"]
                self._modules["loss_fn"] = placed

    @property
    def has_loss_module(self) -> bool:
        """True if the loss function is a module on this rank, which holds the last stage."""
        return "loss_fn" in self._modules

    @property
    def parameters_elsewhere(self) -> set[nn.Parameter]:
        """Parameters of a loss module that another rank trains, which holds the last stage."""
        away = isinstance(self.loss_fn, nn.Module) and not self.has_loss_module
        return {*self.loss_fn.parameters()} - {*self.parameters()} if away else set()

    def named_layers(self) -> list[tuple[int, str, nn.Module]]:
        """Return (index, whole-model name, module) of this rank's layers and of a loss module, which comes last."""
        named = [(int(source), f"layers.{source}", layer) for source, layer in self.layers.items()]
        return [*named, (len(self._list), "loss_fn", self.loss_fn)] if self.has_loss_module else named

    def layers_of_several_ranks(self) -> list[tuple[str, nn.Module]]:
        """Return (name, module) of this rank's tied layers that other ranks of the pipe axis run too."""
        ranks: dict[int, set[int]] = {}
        for rank, (start, stop) in zip(self.placement, pairwise(self.boundaries), strict=True):
            for source in self._sources[start:stop]:
                ranks.setdefault(source, set()).add(rank)
        return [(name, layer) for source, name, layer in self.named_layers() if len(ranks.get(source, ())) > 1]

    def modules_of(self, stage: int, start: int = 0, stop: int | None = None) -> list[tuple[int, nn.Module]]:
        """Return (index in the list of layers, module) of layers of one of this rank's stages, without plain functions.

        ``start`` and ``stop`` are places in the stage's own list; by default all of it.
        """
        return [(call.layer, self.layers[call.key]) for call in self._calls[stage][start:stop] if call.key is not None]

    def calls_of(self, stage: int) -> list[LayerCall]:
        """Return the entries of a stage's list, as ``run_stage`` calls them."""
        return list(self._calls[stage])

    def typenames(self, stage: int) -> list[str]:
        """Return the names of the classes (and functions) of a stage's layers."""
        return [typename(layer) for layer in self._list[self.boundaries[stage] : self.boundaries[stage + 1]]]

    def taken(self, rank: int) -> tuple[str, ...]:
        """Return the names of the fields that the layers of a rank of the pipe axis take."""
        calls = [call for at, calls in zip(self.placement, self._calls, strict=True) if at == rank for call in calls]
        return tuple(dict.fromkeys(name for call in calls for name in call.takes))

    def weighing_layers(self) -> list[tuple[Callable[..., Any], tuple[str, ...]]]:
        """Return the methods ``loss_weight`` of this rank's layers, and the fields that each of them gets."""
        calls = [call for stage in self.stages for call in self._calls[stage]]
        weighing = [(getattr(self.layers[call.key], "loss_weight", None), call.takes) for call in calls if call.key]
        return [(method, takes) for method, takes in weighing if callable(method)]

    def layers_of(self, stage: int) -> list[int]:
        """Return the indices of a stage's modules in the list of layers, in order."""
        return [call.layer for call in self._calls[stage] if call.key is not None]

    def hooked(self, stage: int) -> list[int]:
        """Return the indices with which ``run_hook`` is called for a stage: its layers, then a loss module."""
        is_last = stage == len(self.placement) - 1
        return [*self.layers_of(stage), *([len(self._list)] if is_last and self.has_loss_module else [])]

    def forward(self, x: Any, **fields: Any) -> Any:
        """Run the whole model, if this rank holds all of it. (A pipeline is run by the engine.)

        Args:
            x: input of the first layer.
            fields: the fields that layers take (``LayerSpec(..., takes=...)``).
        """
        if self.grid.pipe.size > 1:
            raise RuntimeError(
                f"the model is cut into {len(self.placement)} stages over {self.grid.pipe.size} ranks: run it with "
                "engine.train_batch or engine.eval_batch"
            )
        if self.training:
            self.dropout_state.begin()
        for stage in self.stages:
            x = self.run_stage(stage, x, fields)
        return self.dropout_state.end(x) if self.training else x

    def move(self, placement: Sequence[int], cut: Sequence[int] | None = None) -> None:
        """Move the stages to the ranks of another placement, as a schedule asks for. Collective.

        The list is cut anew at the boundaries ``cut``, or if the placement has another number of stages. Layers that
        come to this rank are built from their seed, so this is for models that still have their initial weights:
        before training, and before a checkpoint is loaded.

        Raises:
            RuntimeError: weights were changed since they were built.
        """
        if cut is not None:
            self.partition = list(cut)
        if tuple(placement) == self.placement and (cut is None or [*cut] == self.boundaries):
            return
        flags = self.grid.pipe.all_gather_json(self._changed()[:1])
        if any(flags):
            name = next(flag[0] for flag in flags if flag)
            cuts = "" if cut is None else f"partition={list(cut)} and "
            raise RuntimeError(
                f"the schedule places the stages on ranks {list(placement)}, but {name} was changed since it was "
                f"built, and a stage that moves is built again: pass {cuts}placement={list(placement)} to "
                "PipelineModule, and change weights after that"
            )
        if len(placement) == len(self.placement) and cut is None:
            self.placement = place(placement, self.grid.pipe.size, self.chunks)
        else:
            self._cut(placement, len(placement) // self.grid.pipe.size)
        self._build()

    def _changed(self) -> list[str]:
        """Return the names of this rank's parameters that were changed since they were built."""
        if self.grid.pipe.size == 1:
            return []  # not counted, because no layer moves
        if self._placeholders:
            name = self._placeholders.changed(self.parameters())
            return [] if name is None else [name]
        known = {} if self.training_started else self._checksums
        return [name for name, p in self.named_parameters() if int(checksum(p)) != known.get(p)]

    def change_layers(self, change: Callable[[str, nn.Module], object]) -> None:
        """Change the layers of this rank, also layers that ``move`` builds later, for instance to add parameters.

        Args:
            change: called as ``change(name, layer)`` with each layer's name in the whole model, such as ``layers.3``.
                New parameters get whole-model names.
        """
        self._held.change(change)
        before = self._checksums
        self._record_checksums()
        self._checksums.update((p, before[p]) for p in self._checksums.keys() & before.keys())  # values since loaded

    def local_parameters(self) -> list[LocalParameter]:
        """Return this rank's parameters, each once, in the order of the list."""
        stages: dict[nn.Parameter, dict[int, None]] = {}  # the inner dicts are ordered sets
        layers: dict[nn.Parameter, dict[int, None]] = {}
        held = {index: layer for index, _, layer in self.named_layers()}
        for stage in self.stages:
            for index in self.hooked(stage):
                for parameter in held[index].parameters():
                    stages.setdefault(parameter, {})[stage] = None
                    layers.setdefault(parameter, {})[index] = None
        keys = {tie.key: i for i, tie in enumerate(self.ties)}
        parameters = []
        for parameter in stages:
            layout = layout_of(parameter)
            tie = keys.get(layout.tie) if layout.tie is not None else None
            counted = True
            if tie is not None:
                counted = self.placement[self.ties[tie].stages[0]] == self.grid.pipe.rank
                tie = tie if self.tie_axes[tie] is not None else None
            parameters.append(
                LocalParameter(parameter, layout, tuple(stages[parameter]), tuple(layers[parameter]), tie, counted)
            )
        return parameters

    def extra_repr(self) -> str:
        """Return the layers that this rank holds, for ``repr``."""
        cuts = [f"stage {s}: layers {self.boundaries[s]} to {self.boundaries[s + 1] - 1}" for s in self.stages]
        return "; ".join(cuts)

    def _cut(self, placement: str | Sequence[int], chunks: int) -> None:
        """Cut the list into the stages of a placement, and find the weights that stages share."""
        self.placement, self.chunks = place(placement, self.grid.pipe.size, chunks), chunks
        names = [typename(layer) for layer in self._list]
        costs = self.costs
        weigh = self._builder.parameter_counts if costs is None else lambda: [layer.seconds for layer in costs.layers]
        self.boundaries = boundaries(self.partition, len(self.placement), names, weigh)
        self._calls = [[self._call(i) for i in range(a, b)] for a, b in pairwise(self.boundaries)]
        stages = [stage for stage, (start, stop) in enumerate(pairwise(self.boundaries)) for _ in range(start, stop)]
        entries, places = self._list, self._sources
        if isinstance(self.loss_fn, nn.Module):  # it may share parameters with layers
            entries, places = [*entries, self.loss_fn], [*places, len(entries)]
            stages.append(len(self.placement) - 1)
        self.ties, self._shared = find_ties(entries, places, stages)

    def _call(self, index: int) -> LayerCall:
        entry, source = self._list[index], self._sources[index]
        if not isinstance(entry, (LayerSpec, nn.Module)):
            return LayerCall(source, None, entry)
        function = entry.forward_fn if isinstance(entry, TiedLayerSpec) else None
        return LayerCall(source, str(source), function, entry.takes if isinstance(entry, LayerSpec) else ())

    def _build(self) -> None:
        """Hold the layers of this rank's stages, and the loss module, after each cut. Collective."""
        self.recompute.forget()
        stages = [self._sources[self.boundaries[stage] : self.boundaries[stage + 1]] for stage in self.stages]
        self._held.hold([*chain(*stages)], self.ties, self._shared)
        self._place_loss()
        self.tie_axes = [self._tie_axis(tie) for tie in self.ties]
        self._record_checksums()

    def take_loss(self) -> None:
        """Make a loss module that was assigned to ``loss_fn`` after construction a part of the model. Collective."""
        if isinstance(self.loss_fn, nn.Module) and self.loss_fn is not self._placed_loss:
            broadcast(self.loss_fn, self.grid)
            self._cut(self.placement, self.chunks)  # it may share parameters of layers
            self._build()

    def _place_loss(self) -> None:
        """Register a loss module as a submodule on the rank of the last stage; on other ranks it is a plain attribute.

        Every rank keeps the module that the caller built, so that no rank has to send it if the last stage moves.
        """
        self.__dict__["_placed_loss"] = loss_fn = self.loss_fn
        if isinstance(loss_fn, nn.Module):
            self.__dict__.pop("loss_fn", None)
            self._modules.pop("loss_fn", None)
            if self.is_last:
                self.loss_fn = move_module(loss_fn, self.grid.device, self.dtype)
                self._held.name(len(self._list), loss_fn)
            else:
                self.__dict__["loss_fn"] = loss_fn

    def _record_checksums(self) -> None:
        """Record a checksum of each initial weight, from which ``move`` sees that weights were changed.

        (A parameter's version counter does not count writes through ``p.data``.)
        """
        known = self.grid.pipe.size > 1 and not self._placeholders and self.grid.device.type != "meta"
        self._checksums = {p: int(checksum(p)) for p in self.parameters()} if known else {}

    def _tie_axis(self, tie: Tie) -> Axis | None:
        """Return the axis of the pipe ranks that hold a tie, over which its gradient is summed. Collective.

        None if this rank does not hold the tie, or is the only one that does.
        """
        ranks = sorted({self.placement[stage] for stage in tie.stages})
        return self.grid.subgroup("pipe", ranks) if len(ranks) > 1 else None


def _native(grid: Any, partition: Any, seed: Any, others: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return grid, partition and seed of ``PipelineModule``, with the older arguments that say the same.

    Raises:
        TypeError: an unknown argument.
    """
    given = {"grid": grid, "partition": partition, "seed": seed}
    known = [*inspect.signature(PipelineModule).parameters][:-1]
    for adapter in (entry.load() for entry in offered(_OLDER)):
        known += adapter.NAMES
        if theirs := {name: others.pop(name) for name in adapter.NAMES if name in others}:
            given = adapter.native_arguments(given, theirs)
    for name in others:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"give some of {', '.join(known)}"
        raise TypeError(f"PipelineModule has no argument {name!r}: {hint}")
    return given["grid"], given["partition"], given["seed"]


def _check_costs(costs: LayerCosts | None, partition: str | Sequence[int], layers: int) -> None:
    """Check that costs are given where they are needed, and for each layer."""
    searched = partition in SEARCHED if isinstance(partition, str) else False
    if searched and costs is None:
        raise ValueError(
            f"partition={partition!r} needs the costs of the layers: pass costs=triax.measure_layers(layers, "
            "microbatch, grid=grid, loss_fn=loss_fn), or costs=triax.LayerCosts.from_json(file)"
        )
    if costs is not None and not searched:
        raise ValueError(f"costs have no effect on partition={partition!r}: give {', '.join(SEARCHED)}, or no costs")
    if costs is not None and len(costs.layers) != layers:
        raise ValueError(f"the costs are of {len(costs.layers)} layers, and the list has {layers}: give one for each")


def _known_chunks(placement: str | Sequence[int], partition: str | Sequence[int], pipe: int) -> int | None:
    """Return the stages per rank that the ranks or boundaries of the stages give; None if neither was given."""
    if not isinstance(placement, str):
        return max(1, len(placement) // pipe)
    if not isinstance(partition, str):
        return max(1, (len(partition) - 1) // pipe)
    return None


def _as_nest(loss: Any) -> Any:
    """Return a loss as a nest of tensors."""
    return named_losses(loss, "loss_fn returned", "return") if is_named(loss) else loss
