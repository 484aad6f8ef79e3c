"""Weights from and to Hugging Face: ``load_hf(path)`` and ``save_hf(engine, path)``.

layers = load_hf("Qwen/Qwen3-0.6B")                     # LayerSpecs that build themselves with these weights
model = PipelineModule(layers, grid=grid, loss_fn=..., device="meta")
engine = triax.Engine(model, options)  # every rank reads its own part of the files
...
save_hf(engine, "path/to/mine")                         # transformers' from_pretrained reads it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ...base.hub import local_folder
from ...grid import Grid, layout_of
from ...grid.agreement.agreement import agreed
from ...pipe.spec import LayerSpec, TiedLayerSpec
from ..config import TransformerConfig
from ..reward import has_reward_head, reward_layers
from .config import entries as expanded
from .config import from_hf, is_reward, read_config, same_model, without_modules
from .families import FAMILIES
from .family import score_count
from .names import Entry, Names
from .reader import Source, check, check_all_used, fetch, find, open_source, stored
from .save import config_of, entries_of, hugging_face, module_and_grid, named, named_buffers

M = TypeVar("M")


def config_from_hf(path_or_model: Any) -> TransformerConfig:
    """Return the configuration of a Hugging Face model: for example a ``LlamaConfig``.

    Args:
        path_or_model: a folder as ``save_pretrained`` writes it, an id of the Hub as for ``load_hf``, or a live model.

    Raises:
        ValueError: the model is of another family, or has a setting that triax's layers do not support; or there is no
            such repository.
        FileNotFoundError: the folder has no ``config.json``.
    """
    if isinstance(path_or_model, (str, Path)):
        folder = local_folder(path_or_model)
        return from_hf(read_config(folder), folder / "config.json")
    source = open_source(path_or_model)
    return from_hf(source.config, source.file)


@overload
def load_hf(
    path_or_model: Any, into: None = None, *, names: Names | None = None, sequence_parallel: bool = False
) -> list[LayerSpec]: ...
@overload
def load_hf(path_or_model: Any, into: M, *, names: Names | None = None, grid: Grid | None = None) -> M: ...


def load_hf(
    path_or_model: Any,
    into: Any = None,
    *,
    names: Names | None = None,
    grid: Grid | None = None,
    sequence_parallel: bool = False,
) -> Any:
    """Load Hugging Face's weights into a triax model. Each rank reads only the slices that it holds.

    >>> layers = triax.llama_layers(triax.LlamaConfig.preset("llama-tiny"))
    >>> triax.save_hf(triax.PipelineModule(layers), "runs/llama")
    >>> model = triax.PipelineModule(triax.load_hf("runs/llama"))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 256])

    Args:
        path_or_model: a folder with ``config.json`` and ``*.safetensors``; an id of the Hub, ``ORG/NAME`` or
            ``ORG/NAME@REVISION``, which is downloaded into huggingface_hub's cache; or a live ``transformers`` model.
        into: the model that receives the weights. It is one of:
            None, which makes the layers of the model that ``config.json`` describes, a language model or a reward
            model (``ForSequenceClassification`` with one label);
            a list of ``LayerSpec`` s, which is returned with layers that load these weights when they are built. What
            a live model has frozen (``requires_grad_(False)``) is frozen in them;
            a module whose parameters have layouts (a ``PipelineModule`` before its engine, or a module
            that ``parallelize`` sharded), or an ``Engine``, including its fp32 master copy. The values of such a
            module or engine are set at once, collectively over its grid.
        names: triax's parameter names -> Hugging Face's. The default is the table of the model's family, or equal
            names if ``into`` is a Hugging Face model that ``parallelize`` sharded. The tensors of a tuple are
            concatenated along dim 0, and a ``Transposed`` tensor is transposed. In a name, ``{i}`` is the block's
            number, ``{i+2}`` this number plus 2, ``{n}`` the number of blocks, and a final ``*`` stands for weight
            and bias.
        grid: the grid of a module that has no attribute with its grid.
        sequence_parallel: run the model with sequence parallelism; used only if ``into`` is None.

    Returns:
        ``into``, or the list of ``LayerSpec`` s for a ``PipelineModule``. A ``PipelineModule`` with
        ``device="meta"`` builds the layers after it has assigned them to ranks, so that no rank ever holds more
        than its part of the model plus one layer.

    Raises:
        ValueError: the model is of another family, sizes or settings differ, a weight is missing in the source, or
            a weight of the source belongs to no parameter. The message has triax's and Hugging Face's name. Or there
            is no such repository, or it is not in the cache and the Hub cannot be reached.
    """
    if into is None:
        source = open_source(path_or_model)
        config = from_hf(source.config, source.file)
        specs = config.layers(sequence_parallel=sequence_parallel)
        specs = reward_layers(specs) if is_reward(source.config) else specs
        return self_loading(specs, source, names)
    if isinstance(into, Sequence):
        return self_loading(into, open_source(path_or_model), names)
    module, grid = module_and_grid(into, grid, "load_hf(path, module, grid=grid)")
    assign = getattr(into, "assign", None)
    with agreed(grid, None):
        source = open_source(path_or_model)
        made_of = _checked(module, source, names, held=assign is not None)
    with agreed(grid, None), torch.no_grad():
        for parameter, (ours, entry) in made_of.items():
            value = fetch(source, ours, entry, layout_of(parameter), grid)
            if assign is not None and isinstance(parameter, nn.Parameter):  # an engine holds the values
                assign(parameter, value)
            else:
                parameter.copy_(value)
    if hugging_face(module)[0] is None:
        module.folder_settings = source.settings  # type: ignore[assignment]
    return into


class _Loaded:
    """Constructor for a ``LayerSpec`` that builds a layer and loads the layer's weights from a source."""

    def __init__(self, cls: Any, index: int, source: Source, entries: Mapping[str, Entry]) -> None:
        self.cls, self.index, self.source, self.entries = cls, index, source, entries
        self.__name__ = getattr(cls, "__name__", type(cls).__name__)
        self.folder_settings = source.settings  # save_hf and checkpoints find them here

    @torch.no_grad()
    def __call__(self, *args: Any, grid: Grid, **kwargs: Any) -> nn.Module:
        spec = LayerSpec(self.cls, *args, **kwargs)
        wanted = torch.get_default_device()
        # triax's layers hold only parameters. Built on the meta device, they draw no initial values, which the loaded
        # weights would replace.
        here = getattr(self.cls, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
        hollow = getattr(self.cls, "hollow", here)
        with torch.device("meta" if hollow else wanted):
            layer = spec.build(grid)
        prefix = f"layers.{self.index}."
        own = {prefix + name: parameter for name, parameter in layer.named_parameters()}
        buffers = dict(layer.named_buffers(prefix.removesuffix(".")))
        held = _buffers_of(self.source, self.entries, buffers)
        _no_more(self.source, self.entries, {**own, **buffers}, prefix)
        for ours, parameter in {
            **own,
            **held,
        }.items():  # on the meta device every rank checks every layer and sees the errors
            pieces = check(self.source, ours, _entry(self.entries, ours, layer), layout_of(parameter))
            if all(piece.name in self.source.frozen for piece in pieces):
                parameter.requires_grad_(False)
        if wanted.type == "meta":
            return layer
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for ours, parameter in own.items():
            entry, layout = self.entries[ours], layout_of(parameter)
            value = fetch(self.source, ours, entry, layout, grid)
            value = value.to(wanted, torch.promote_types(parameter.dtype, value.dtype)).contiguous()
            filled[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            filled[parameter].__dict__.update(parameter.__dict__)
        for module in layer.modules():
            for name, old in module._parameters.items():
                if old is not None:
                    module._parameters[name] = filled[old]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.zeros_like(buffer, device=wanted)
        for ours, kept in layer.named_buffers(prefix.removesuffix(".")):
            if ours in held:
                kept.copy_(fetch(self.source, ours, self.entries[ours], layout_of(kept), grid))
        return layer


def self_loading(specs: Sequence[Any], source: Source, names: Names | None) -> list[LayerSpec]:
    """Return copies of layers' specs whose layers read their own weights from ``source`` when they are built."""
    entries = expanded(names, _config_for(source, specs))
    check_all_used(source, entries.values())
    _same(source, specs)
    first: dict[Any, _Loaded] = {}
    loading: list[LayerSpec] = []
    for index, spec in enumerate(specs):
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"layer {index} is a {type(spec).__name__}, not a LayerSpec. Write LayerSpec(cls, ...).")
        key = (spec.key, spec.cls) if isinstance(spec, TiedLayerSpec) else index
        cls = first.setdefault(key, _Loaded(spec.cls, index, source, entries))
        new = object.__new__(type(spec))
        new.__dict__.update(spec.__dict__, cls=cls)
        loading.append(new)
    return loading


def _checked(module: nn.Module, source: Source, names: Names | None, held: bool) -> dict[Tensor, tuple[str, Entry]]:
    """Find the source tensors of a module's parameters and buffers, and check them before any is read or written.

    Args:
        module: the module.
        source: the source of the weights.
        names: triax's names -> Hugging Face's; None: the table of the model's family.
        held: True if an engine holds the parameters' values, so that the parameters' own tensors may be empty.

    Returns:
        parameter or buffer -> (triax's name, its source tensors).
    """
    own = named(module)
    entries = entries_of(module, names, _config_for(source, getattr(module, "layer_specs", ())))
    check_all_used(source, entries.values())
    _same(source, getattr(module, "layer_specs", ()))
    layers = {".".join(name.split(".")[:2]) + "." for name in own if name.startswith("layers.")}
    for prefix in layers if hugging_face(module)[0] is None else ():
        _no_more(source, entries, {**own, **named_buffers(module)}, prefix)
    made_of: dict[Tensor, tuple[str, Entry]] = {}
    for ours, parameter in {**own, **_buffers_of(source, entries, named_buffers(module))}.items():
        empty = parameter.is_meta or (parameter.numel() > 1 and not any(parameter.stride()))
        if empty and not held:
            raise RuntimeError(
                f"{ours} has no values, because the model is on the meta device or an engine holds the values. Build "
                "the model from the layers of load_hf(path), call model.fill() first, or pass the engine."
            )
        made_of[parameter] = ours, _entry(entries, ours, module)
        check(source, *made_of[parameter], layout_of(parameter))
    return made_of


def _buffers_of(source: Source, entries: Mapping[str, Entry], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of a module's buffers that the source has, by name."""
    return {
        name: buffer
        for name, buffer in buffers.items()
        if name in entries and any(find(source, theirs) for theirs in stored(source, entries[name]).theirs)
    }


def _entry(entries: Mapping[str, Entry], ours: str, layer: nn.Module) -> Entry:
    if ours not in entries:
        near = [name for name in entries if name.rpartition(".")[0] == ours.rpartition(".")[0]] or list(entries)[:4]
        raise ValueError(
            f"names have no entry for {ours} (of a {type(layer).__name__}), only for {', '.join(near)}. Add "
            f"Hugging Face's name of it, names={{{ours!r}: '...', ...}}."
        )
    return entries[ours]


def _no_more(source: Source, entries: Mapping[str, Entry], own: Mapping[str, Any], prefix: str) -> None:
    """Raise ValueError if the source has a weight of a layer, such as a bias, without a parameter to load it into."""
    for ours, entry in entries.items():
        theirs = stored(source, entry).theirs[:1]
        if ours.startswith(prefix) and ours not in own and theirs and find(source, theirs[0]) is not None:
            raise ValueError(
                f"{source.where} has {theirs[0]}, but the model has no {ours} to take it. Build the model that "
                "its config.json describes, config_from_hf(path)."
            )


def _config_for(source: Source, specs: Sequence[Any]) -> dict[str, Any]:
    """Return a source's configuration with the modules of multi-token prediction that the layers have."""
    return without_modules(source.config, getattr(config_of(specs), "num_nextn_predict_layers", 0))


def _same(source: Source, specs: Sequence[Any]) -> None:
    """Check that triax's model computes the same function as the source's, if their weights are equal.

    Raises:
        ValueError: a setting of the two configurations differs.
    """
    ours = config_of(specs)
    known = FAMILIES.get(str(source.config.get("model_type")))
    if ours is None or known is None or known.config is None:
        return
    if is_reward(source.config) and (count := score_count(source.config)) != 1:
        raise ValueError(
            f"{source.where} has {count} scores, but triax's layers have one, a reward: give a folder with "
            "num_labels=1. triax.parallelize shards the Hugging Face model itself."
        )
    if is_reward(source.config) != has_reward_head(specs):
        what = "a reward model" if is_reward(source.config) else "a language model"
        raise ValueError(
            f"{source.where} has {what}, but the layers are those of another kind. For a reward model with the blocks "
            "of a language model and a new head write reward_layers(load_hf(path)); for that of a folder load_hf(path)."
        )
    if differing := same_model(ours, from_hf(source.config, source.file)):
        raise ValueError(f"the model differs from that of {source.where}: {differing}. Use config_from_hf(path).")
