"""PipelineModule: a list of layers of which each rank builds only its own, under whole-model names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..grid import Axis, Grid, Layout, layout_of
from ..grid.layout import rename
from ..grid.random import Dropout, DropoutState, seeded
from .dialect import grid_of, partition_of, seed_of
from .meta import Placeholders, Put
from .partition import boundaries, place
from .recompute import Recompute
from .spec import LayerSpec, TiedLayerSpec
from .ties import Layer, Tie, find_ties, share, sources, typename


class Placed(NamedTuple):
    """A parameter of this rank, and what the data axis must know of it."""

    parameter: nn.Parameter
    layout: Layout
    stages: tuple[int, ...]  # the stages of this rank that use it
    layers: tuple[int, ...]  # the layers that use it, by their first place in the list
    tie: int | None  # index into PipelineModule.ties, where other ranks hold it too
    counted: bool  # whether this rank's stage is the one that counts it (a tie is counted once)


class PipelineModule(nn.Module):
    """A model as a list of layers, cut into stages along the pipe axis.

    Each layer is called with one argument: what the layer before returned. A rank builds its own layers only,
    each from random numbers that depend on ``seed`` and on the layer's place in the list, so every grid starts
    from bitwise the same weights. Parameters go by whole-model names: ``layers.3.up.weight`` is in the fourth
    entry of the list, wherever it runs.

    A module listed twice, and the ``TiedLayerSpec`` s of one key, are one layer: built once, its weights the same
    wherever it runs. So is a parameter that two listed modules share. (``[LayerSpec(...)] * 4`` is four layers.)

    Args:
        layers: ``LayerSpec`` s, ``nn.Module`` s, and functions of one argument. Modules that are already built
            take rank 0's weights, as in DDP.
        grid: by default ``Grid()``: every process a replica.
        loss_fn: ``loss_fn(outputs, labels)`` returns a mean (every microbatch then weighs alike), or a pair
            ``(sum, weight)`` that the engine divides once, over the whole batch. None: the last layer returns that.
        partition: where to cut: ``"parameters"`` (least largest stage; the default), ``"uniform"``, ``"type:REGEX"``,
            or boundaries such as ``[0, 8, 16, 23, 30]``.
        num_stages: in place of a grid: so many ranks on the pipe axis, the others are replicas.
        topology: in place of a grid: a ``triax.Topology``, or one of DeepSpeed's.
        partition_method: DeepSpeed's name of ``partition``.
        chunks: stages per rank of the pipe axis.
        placement: the rank of each stage: ``"loop"`` deals them round, ``"v"`` goes to and fro, or a list. The
            engine moves stages to where its schedule wants them, so this only saves building them twice.
        seed: of the initial weights; by default 0. (The configuration's ``seed`` is that of data order and dropout.)
        dtype: of parameters; None leaves what the layers make.
        device: ``"meta"`` builds placeholders (NaN); ``triax.initialize``, or ``fill``, then builds one layer after
            the other, bitwise the same, so that in stage 3 of ZeRO no rank holds more than its shard and a layer.
        activation_checkpoint_interval: recompute groups of so many layers of a stage in the backward pass, instead of
            keeping what they save for it; 0: none. The configuration's ``activation_checkpointing`` has more.
        checkpointable_layers: the classes of layers to recompute; by default all.
        output_fn: applied to the last layer's output where ``eval_batch`` is asked for outputs, e.g. to gather
            a vocabulary that is sharded.
        others: DeepSpeed's ``seed_layers`` (layers are, always) and ``base_seed`` (another name of ``seed``).

    Raises:
        ValueError: the layers cannot be cut so; the message says how they can.
        TypeError: an argument that there is not, or that is DeepSpeed's and cannot act here.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        grid: Grid | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        partition: str | Sequence[int] | None = None,
        *,
        num_stages: int | None = None,
        topology: Any = None,
        partition_method: str | Sequence[int] | None = None,
        chunks: int = 1,
        placement: str | Sequence[int] = "loop",
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        output_fn: Callable[[Any], Any] | None = None,
        activation_checkpoint_interval: int = 0,
        checkpointable_layers: Sequence[str] | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if device is not None and torch.device(device).type != "meta":
            raise ValueError(f"device={str(device)!r}: layers go to the grid's; pass device='meta' to build them later")
        self.seed = seed = seed_of(seed, others, [*inspect.signature(PipelineModule).parameters][:-1])
        partition = partition_of(partition, partition_method)
        self.grid = grid_of(grid, num_stages, topology)
        self.loss_fn, self.output_fn, self.dtype = loss_fn, output_fn, dtype
        self.chunks = chunks
        self.placement = place(placement, self.grid.pipe.size, chunks)
        self._hollow = device is not None  # layers are built without their values until ``fill``
        self._placeholders = Placeholders(self._new)
        self.dropout_state = DropoutState(seed)
        interval = self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = checkpointable_layers
        self.recompute = Recompute(self.grid, self.dropout_state, interval, layers=checkpointable_layers)
        # Called, where it is set, as around(stage, layer, call, x) in place of call(x): ZeRO 3 gathers weights there.
        self.around: Callable[[int, int, Callable[[Any], Any], Any], Any] | None = None
        # Called, where it is set, with layers that a recomputation will run: ZeRO 3 starts to gather them.
        self.ahead: Callable[[Sequence[int]], None] | None = None
        self.trained = False  # set by the engine, whose optimizer changes weights behind their version counters
        self._list = list(layers)
        self._sources = sources(self._list)
        names = [typename(layer) for layer in self._list]
        self.boundaries = boundaries(partition, len(self.placement), names, self._count)
        self._synchronise_built()
        self._runs = [[self._run(i) for i in range(a, b)] for a, b in pairwise(self.boundaries)]
        stages = [self._stage_of(index) for index in range(len(self._list))]
        self.ties, self._shared = find_ties(self._list, self._sources, stages)
        self.layers = nn.ModuleDict()
        self._build()

    @property
    def specs(self) -> list[Layer]:
        """The list of layers, as it was given."""
        return list(self._list)

    @property
    def stages(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage, rank in enumerate(self.placement) if rank == self.grid.pipe.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage, which reads the inputs."""
        return self.placement[0] == self.grid.pipe.rank

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which reads the labels."""
        return self.placement[-1] == self.grid.pipe.rank

    def fill(self, put: Put | None = None) -> None:
        """Build the layers of a model of ``device="meta"``, one after the other; nothing to do for any other.

        Args:
            put: called as ``put(parameter, value)`` with each parameter's initial value; returns whether it was
                kept elsewhere (a shard of it, say). None, or a value not kept: the parameter takes it.

        Raises:
            RuntimeError: see ``require_untouched``.
        """
        if put is None:
            self.require_untouched()
        self._placeholders.fill(self.layers, put or (lambda parameter, value: False))
        self._hollow = False
        if put is None:
            self._remember()

    def require_untouched(self) -> None:
        """Refuse to go on with placeholders that somebody gave values.

        Raises:
            RuntimeError: those values would be lost.
        """
        name = self._placeholders.disturbed(self.parameters())
        if name is not None:
            raise RuntimeError(
                f"{name} was changed while it was a placeholder, and its values would be lost: call model.fill() "
                "first, or leave out device='meta'"
            )

    def run_stage(self, stage: int, x: Any) -> Any:
        """Run the layers of one of this rank's stages."""
        if self._placeholders:
            raise RuntimeError("the weights are placeholders still: triax.initialize, or model.fill(), builds them")
        for group in self.recompute.groups(self, stage):
            run = partial(self._run_layers, stage, group.start, group.stop)
            ahead = partial(self.ahead, group.layers) if self.ahead is not None else None
            x = self.recompute.run(group, run, x, ahead=ahead) if group.again else run(x)
        return x

    @property
    def listed(self) -> list[Any]:
        """The whole model's layers as they were given, those of other ranks too."""
        return self._list

    def _run_layers(self, stage: int, start: int, stop: int, x: Any) -> Any:
        layers, around = self.layers, self.around
        for index, key, function in self._runs[stage][start:stop]:
            if key is None:
                x = function(x)
                continue
            layer = layers[key]
            call = layer if function is None else partial(function, layer)
            x = call(x) if around is None else around(stage, index, call, x)
        return x

    def held(self, stage: int, start: int = 0, stop: int | None = None) -> list[tuple[int, nn.Module]]:
        """Those with parameters of the layers ``start`` to ``stop`` of one of this rank's stages, by their number."""
        return [(index, self.layers[key]) for index, key, _ in self._runs[stage][start:stop] if key is not None]

    def typenames(self, stage: int) -> list[str]:
        """The classes (and functions) of a stage's layers."""
        return [typename(layer) for layer in self._list[self.boundaries[stage] : self.boundaries[stage + 1]]]

    def layers_of(self, stage: int) -> list[int]:
        """The layers with parameters that one of this rank's stages runs, in order, as ``around`` is told of them."""
        indices = range(self.boundaries[stage], self.boundaries[stage + 1])
        return [self._sources[i] for i in indices if isinstance(self._list[i], (LayerSpec, nn.Module))]

    def forward(self, x: Any) -> Any:
        """The whole model, where this rank holds all of it; a pipeline is run by the engine."""
        if self.grid.pipe.size > 1:
            raise RuntimeError(
                f"the model is cut into {len(self.placement)} stages over {self.grid.pipe.size} ranks: run it with "
                "engine.train_batch or engine.eval_batch"
            )
        if self.training:
            self.dropout_state.begin()
        for stage in self.stages:
            x = self.run_stage(stage, x)
        return self.dropout_state.end(x) if self.training else x

    def move(self, placement: Sequence[int]) -> None:
        """Put the stages on other ranks, as a schedule wants them. Collective.

        Layers that come to this rank are built as they would have been at first, so it is for models whose weights
        are the initial ones still: before training, and before a checkpoint is loaded.

        Raises:
            RuntimeError: weights were changed since they were built.
        """
        if tuple(placement) == self.placement:
            return
        if self._placeholders:
            changed = [name] if (name := self._placeholders.disturbed(self.parameters())) else []
        else:
            changed = [name for name, p in self.named_parameters() if self.trained or _bits(p) != self._built.get(p)]
        flags = self.grid.pipe.all_gather_object(changed[:1])
        if any(flags):
            name = next(found[0] for found in flags if found)
            raise RuntimeError(
                f"stages must move to ranks {list(placement)}, but {name} was changed since it was built: pass "
                f"PipelineModule(..., placement={list(placement)}) and change it then"
            )
        self.placement = place(placement, self.grid.pipe.size, self.chunks)
        used = {self._sources[i] for s in self.stages for i in range(self.boundaries[s], self.boundaries[s + 1])}
        for source in [int(key) for key in self.layers if int(key) not in used]:
            del self.layers[str(source)]
        self._placeholders.keep(self.parameters(), used)
        self._build()

    def placed(self) -> list[Placed]:
        """This rank's parameters, each once, in the order of the list."""
        stages: dict[nn.Parameter, list[int]] = {}
        layers: dict[nn.Parameter, list[int]] = {}
        for stage in self.stages:
            for index in range(self.boundaries[stage], self.boundaries[stage + 1]):
                if isinstance(self._list[index], (LayerSpec, nn.Module)):
                    for parameter in self.layers[str(self._sources[index])].parameters():
                        for users, user in ((stages, stage), (layers, self._sources[index])):
                            used = users.setdefault(parameter, [])
                            if user not in used:
                                used.append(user)
        keys = {tie.key: i for i, tie in enumerate(self.ties)}
        placed = []
        for parameter, used in stages.items():
            layout = layout_of(parameter)
            tie = keys.get(layout.tie) if layout.tie is not None else None
            counted = True
            if tie is not None:
                counted = self.placement[self.ties[tie].stages[0]] == self.grid.pipe.rank
                tie = tie if self.tie_axes[tie] is not None else None
            placed.append(Placed(parameter, layout, tuple(used), tuple(layers[parameter]), tie, counted))
        return placed

    def extra_repr(self) -> str:
        """Which layers this rank holds."""
        cuts = [f"stage {s}: layers {self.boundaries[s]} to {self.boundaries[s + 1] - 1}" for s in self.stages]
        return "; ".join(cuts)

    def _run(self, index: int) -> tuple[int, str | None, Any]:
        """How a place of the list is run: its layer, the key of that in ``layers``, and the function to call."""
        entry, source = self._list[index], self._sources[index]
        if not isinstance(entry, (LayerSpec, nn.Module)):
            return source, None, entry
        return source, str(source), entry.forward_fn if isinstance(entry, TiedLayerSpec) else None

    def _stage_of(self, index: int) -> int:
        return next(stage for stage, stop in enumerate(self.boundaries[1:]) if index < stop)

    def _count(self) -> list[float]:
        """The parameters of each layer (whole, not this rank's shard), counted on the meta device."""
        counts: dict[int, float] = {}
        for index, entry in enumerate(self._list):
            if id(entry) in counts:
                continue
            if isinstance(entry, LayerSpec):
                layer: nn.Module | None = self._on_meta(index, "pass partition='uniform' or boundaries")
            else:
                layer = entry if isinstance(entry, nn.Module) else None
            parameters = layer.parameters() if layer is not None else ()
            counts[id(entry)] = float(sum(torch.Size(layout_of(p).shape).numel() for p in parameters))
        return [counts[id(entry)] for entry in self._list]

    def _synchronise_built(self) -> None:
        """Give modules that came built the weights of rank 0: each process made its own."""
        if self.grid.size == 1:
            return
        for source, entry in enumerate(self._list):
            if isinstance(entry, nn.Module) and self._sources[source] == source:
                for tensor in [*entry.parameters(), *entry.buffers()]:
                    # A shard differs from one tensor rank to the next: take it from its own tensor rank.
                    sharded = layout_of(tensor).sharded
                    axis = self.grid.joint("pipe", "data") if sharded else self.grid.world
                    data = tensor.detach().to(self.grid.device).contiguous()
                    axis.broadcast(data)
                    tensor.data.copy_(data)

    def _build(self) -> None:
        """Build this rank's layers, share what they share, and give every parameter its whole-model name."""
        self.recompute.forget()
        keys = {tie.key for tie in self.ties}
        for stage in self.stages:
            for index in range(self.boundaries[stage], self.boundaries[stage + 1]):
                source = self._sources[index]
                if isinstance(self._list[source], (LayerSpec, nn.Module)) and str(source) not in self.layers:
                    layer = self._make(source)
                    self.layers[str(source)] = layer
                    if self._hollow and isinstance(self._list[source], LayerSpec):
                        self._placeholders.replace(source, layer, self.grid.device)
                    for attribute, parameter in layer.named_parameters():
                        name, key = self._shared.get((source, attribute), (f"layers.{source}.{attribute}", ""))
                        key = key or f"layers.{source}"
                        rename(parameter, name, key if key in keys else None)
                    for name, module in layer.named_modules():
                        if isinstance(module, Dropout):
                            module.bind(f"layers.{source}.{name}", self.dropout_state)
        self.tie_axes = [self._tie_axis(tie) for tie in self.ties]
        self._remember()

    def _remember(self) -> None:
        """What tells `move` that weights are the initial ones still. (Their version counters do not see `p.data`.)"""
        known = self.grid.pipe.size > 1 and not self._placeholders
        self._built = {p: _bits(p) for p in self.parameters()} if known else {}

    def _new(self, source: int) -> nn.Module:
        """Build one layer, the same on every rank that does."""
        entry = self._list[source]
        if isinstance(entry, LayerSpec):
            with seeded(self.seed, f"layers.{source}"), torch.device("cpu"):
                entry = entry.build(self.grid)
        assert isinstance(entry, nn.Module)
        return entry.to(device=self.grid.device, dtype=self.dtype)

    def _on_meta(self, index: int, otherwise: str) -> nn.Module:
        """Build a layer without its values."""
        spec = self._list[index]
        assert isinstance(spec, LayerSpec)
        try:
            with seeded(self.seed), torch.device("meta"):
                return spec.build(self.grid).to(dtype=self.dtype)
        except Exception as error:
            if "meta" not in str(error).lower():
                raise
            what = f"layer {index}, {spec}, cannot be built on the meta device"
            raise ValueError(f"{what} ({error}): {otherwise}") from error

    def _make(self, source: int) -> nn.Module:
        """Build one layer, or its placeholders, with the parameters that it shares."""
        entry = self._list[source]
        hollow = self._hollow and isinstance(entry, LayerSpec)
        layer = self._on_meta(source, "leave out device='meta'") if hollow else self._new(source)
        if isinstance(entry, TiedLayerSpec):
            for attribute in entry.tied_weight_attr:
                name, _ = self._shared.get((source, attribute), ("", ""))
                home = int(name.split(".")[1]) if name else source
                if home != source:
                    # Another class's layer owns this weight: take it from there, or build it as it is built there.
                    owner = self.layers[str(home)] if str(home) in self.layers else self._make(home)
                    share(owner, layer, attribute, self._list[home], entry)
        return layer

    def _tie_axis(self, tie: Tie) -> Axis | None:
        """The ranks that hold a tie; None where this rank does not, or holds all of it. Collective."""
        ranks = sorted({self.placement[stage] for stage in tie.stages})
        return self.grid.subgroup("pipe", ranks) if len(ranks) > 1 else None


def _bits(parameter: Tensor) -> int:
    """A number that changes when the parameter does: the sum of its elements' bits, read as integers."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(parameter.element_size(), torch.uint8)
    return int(parameter.detach().reshape(-1).view(words).sum(dtype=torch.int64))
