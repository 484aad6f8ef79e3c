"""Layers of this rank's stages: built when a stage comes to this rank, and dropped when it leaves.

A layer is named by its ``source``, its first index in the model's list. One layer in time:

    built         with its initial values, or on the meta device, where placeholders take the place of its parameters
    shared        a ``TiedLayerSpec`` takes the weights that it shares from the layer that has them
    changed       by the functions of ``change``, for instance to add LoRA's parameters
    named         its parameters as in the whole model; its dropouts and auxiliary losses are bound.  Again in each cut
    filled        if it has placeholders: it is built once more, with values
    dropped       its last stage has left this rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from ..grid.auxiliary import AuxiliaryLayer, AuxiliaryLosses
from ..grid.layout import rename
from ..grid.randomness.random import DropoutState, SampleRandom
from .layer_builder import LayerBuilder
from .placeholders import Placeholders, Put
from .spec import LayerSpec, TiedLayerSpec
from .ties import Tie, share

Change = Callable[[str, nn.Module], object]
Shared = Mapping[tuple[int, str], tuple[str, str]]  # (source, attribute) -> name in the whole model, key of its tie


class StageLayers:
    """Layers of this rank's stages, and their names.

    Args:
        builder: builds a layer of the list from its entry.
        on_meta: layers are built without their values, until ``fill``.
        dropout_state, auxiliary: state that dropouts and auxiliary losses share with the engine.

    Attributes:
        modules: the layers, by their sources.
        placeholders: their parameters that have no values yet.

    From one ``hold`` to the next, ``_tied`` are the keys of the cut's ties, and ``_shared`` the weights that several
    layers have, as ``find_ties`` returns them.
    """

    def __init__(
        self, builder: LayerBuilder, on_meta: bool, dropout_state: DropoutState, auxiliary: AuxiliaryLosses
    ) -> None:
        self._builder, self._on_meta = builder, on_meta
        self._dropout_state, self._auxiliary = dropout_state, auxiliary
        self._changes: list[Change] = []
        self._tied: set[str] = set()
        self._shared: Shared = {}
        self.modules = nn.ModuleDict()
        self.placeholders = Placeholders(self._build_changed)

    def hold(self, sources: Sequence[int], ties: Sequence[Tie], shared: Shared) -> None:
        """Hold the layers of a cut's stages: drop others, build those that are missing, and name all of them.

        Args:
            sources: the layers of this rank's stages.
            ties, shared: as ``find_ties`` returns them.
        """
        self._tied, self._shared = {tie.key for tie in ties}, shared
        for source in [int(key) for key in self.modules if int(key) not in sources]:
            del self.modules[str(source)]
        self.placeholders.keep(self.modules.parameters(), sources)
        for key, layer in self.modules.items():  # other cuts make other ties
            self.name(int(key), layer)
        for source in sources:
            if isinstance(self._builder.entries[source], (LayerSpec, nn.Module)) and str(source) not in self.modules:
                self.modules[str(source)] = layer = self._make(source)
                self._hold_places(source, layer)
                self._change(source, layer, self._changes)

    def change(self, change: Change) -> None:
        """Change the layers, also those that are built later, as ``PipelineModule.change_layers`` does."""
        self._changes.append(change)
        for key, layer in self.modules.items():
            self._change(int(key), layer, [change])
        self.placeholders.keep(self.modules.parameters(), map(int, self.modules))

    def fill(self, put: Put) -> None:
        """Build the layers that have placeholders, one after the other; ``put`` as in ``PipelineModule.fill``."""
        self.placeholders.fill(self.modules, put)
        self._on_meta = False

    def name(self, source: int, layer: nn.Module) -> None:
        """Give a layer's parameters their whole-model names, and bind its dropouts and auxiliary losses.

        The source of a loss module is the length of the list.
        """
        prefix = f"layers.{source}" if source < len(self._builder.entries) else "loss_fn"
        for attribute, parameter in layer.named_parameters():
            name, key = self._shared.get((source, attribute), (f"{prefix}.{attribute}", ""))
            key = key or f"layers.{source}"
            rename(parameter, name, key if key in self._tied else None)
        for name, module in layer.named_modules():
            if isinstance(module, SampleRandom):
                module.bind(f"{prefix}.{name}", self._dropout_state)
            elif isinstance(module, AuxiliaryLayer):
                module.bind(f"{prefix}.{name}".rstrip("."), self._auxiliary)

    def _change(self, source: int, layer: nn.Module, changes: Sequence[Change]) -> None:
        """Change a layer, and name what it then has."""
        for change in changes:
            change(f"layers.{source}", layer)
        self._hold_places(source, layer)
        self.name(source, layer)

    def _hold_places(self, source: int, layer: nn.Module) -> None:
        """Replace the meta parameters of a layer by placeholders, if the layer is built later."""
        if self._on_meta and isinstance(self._builder.entries[source], LayerSpec):
            self.placeholders.replace(source, layer, self._builder.grid.device)

    def _make(self, source: int) -> nn.Module:
        """Build a layer, or its twin on the meta device.

        Parameters that it shares with a tied layer of another class are taken from that layer.
        """
        entry = self._builder.entries[source]
        if self._on_meta and isinstance(entry, LayerSpec):
            layer = self._builder.build_on_meta(source, "leave out device='meta'")
        else:
            layer = self._builder.build(source)
        for (i, attribute), (shared, _) in self._shared.items():
            if i == source and isinstance(entry, TiedLayerSpec):
                # Another layer of this rank may have this weight already. Else the layer that owns it is built for it.
                holders = [i for (i, _), (name, _) in self._shared.items() if name == shared and str(i) in self.modules]
                home = holders[0] if holders else int(shared.split(".")[1])
                if home != source:
                    owner = self.modules[str(home)] if holders else self._make(home)
                    share(owner, layer, attribute, self._builder.entries[home], entry)
        return layer

    def _build_changed(self, source: int) -> nn.Module:
        """Build one layer with its values, and change it."""
        layer = self._builder.build(source)
        for change in self._changes:
            change(f"layers.{source}", layer)
        return layer
