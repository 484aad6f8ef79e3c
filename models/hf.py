"""Weights from and to Hugging Face: ``load_hf(path)`` and ``save_hf(engine, path)``.

layers = load_hf("path/to/Llama-3.2-1B")                # LayerSpecs that build themselves with these weights
model = PipelineModule(layers, grid=grid, loss_fn=..., device="meta")
engine, *_ = triax.initialize(model=model, config=...)  # every rank reads its own part of the files
...
save_hf(engine, "path/to/mine")                         # transformers' from_pretrained reads it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from ..grid import Grid, layout_of
from ..pipe.spec import LayerSpec, TiedLayerSpec
from .config import GPTConfig, LlamaConfig
from .gpt import gpt
from .hf_config import from_hf, layer_count, same_model
from .hf_names import FAMILIES, Entry, Names, Transposed, expand, names_of
from .hf_read import Source, check, fetch, find, open_source, unused
from .hf_save import agree, hugging_face, named, save_hf, wrapping
from .llama import llama

__all__ = ["Names", "Transposed", "config_from_hf", "load_hf", "save_hf"]

M = TypeVar("M")


def config_from_hf(path_or_model: Any) -> GPTConfig | LlamaConfig:
    """The configuration of a Hugging Face model of the families gpt2, llama, qwen2 and qwen3.

    Args:
        path_or_model: a folder as ``save_pretrained`` writes it, or a live model.

    Raises:
        ValueError: another family, or a setting that our layers do not have.
        FileNotFoundError: no ``config.json``.
    """
    return from_hf(open_source(path_or_model).config)


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
    """Hugging Face's weights for a model of ours. Each rank reads the slices that it holds, and nothing else.

    Args:
        path_or_model: a folder with ``config.json`` and ``*.safetensors``, or a live ``transformers`` model.
        into: what takes them:
            None: the model that ``config.json`` describes, ``gpt`` or ``llama``;
            a list of ``LayerSpec`` s: those, and no others, build themselves with these weights;
            a module whose parameters have layouts (a ``PipelineModule`` before ``triax.initialize``, or what
            ``parallelize`` sharded) or an ``Engine``, masters and all: filled now. Collective over its grid.
        names: our names -> Hugging Face's; by default those of the family, or the same names where a Hugging Face
            model itself was sharded. A tuple is fused along dim 0, ``Transposed`` is transposed; ``{i}`` is a block's
            number, ``{i+2}`` the same and two more, ``{n}`` the number of blocks, a last ``*`` weight and bias.
        grid: of a module that does not keep its own.
        sequence_parallel: of the model that is made where ``into`` is None.

    Returns:
        ``into``, or the list of ``LayerSpec`` s for a ``PipelineModule``. With ``device="meta"`` it builds them once
        it is known who holds what, so that no rank ever holds more than its part and a layer.

    Raises:
        ValueError: another family; sizes or settings that differ; weights that are not there, or that nothing here
            takes. The messages have both names.
    """
    source = open_source(path_or_model)
    if into is None:
        config = from_hf(source.config)
        specs = gpt(config, sequence_parallel) if isinstance(config, GPTConfig) else llama(config, sequence_parallel)
        return _self_loading(specs, source, names or names_of(source.config["model_type"]))
    if isinstance(into, Sequence):
        return _self_loading(into, source, names or names_of(source.config.get("model_type")))
    module = into if isinstance(into, nn.Module) else getattr(into, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"load_hf fills LayerSpecs, a module or an engine, not a {type(into).__name__}: leave it out and put what "
            "load_hf(path) returns into a PipelineModule"
        )
    grid = grid or getattr(into, "grid", None)
    if grid is None:
        raise ValueError(f"a {type(into).__name__} does not keep its grid: pass load_hf(path, module, grid=grid)")
    assign = getattr(into, "assign", None)
    with agree(grid):
        made_of = _checked(module, source, names, held=assign is not None)
    with agree(grid):
        _fill(made_of, source, grid, assign)
    return into


class _Loaded:
    """A layer's class, whose instances start from these weights; of LayerSpec's arguments it is the first."""

    def __init__(self, cls: Any, index: int, source: Source, entries: Mapping[str, Entry]) -> None:
        self.cls, self.index, self.source, self.entries = cls, index, source, entries
        self.__name__ = getattr(cls, "__name__", type(cls).__name__)

    @torch.no_grad()
    def __call__(self, *args: Any, grid: Grid, **kwargs: Any) -> nn.Module:
        spec = LayerSpec(self.cls, *args, **kwargs)
        wanted = torch.empty(0).device
        # Our layers are parameters and nothing else: made without values, they need not draw what is thrown away.
        here = getattr(self.cls, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
        hollow = getattr(self.cls, "hollow", here)
        with torch.device("meta" if hollow else wanted):
            layer = spec.build(grid)
        prefix = f"layers.{self.index}."
        own = {prefix + name: parameter for name, parameter in layer.named_parameters()}
        _no_more(self.source, self.entries, own, prefix)
        for ours, parameter in own.items():  # on the meta device every rank does so for all layers, and hears of errors
            check(self.source, ours, _entry(self.entries, ours, layer), layout_of(parameter))
        if wanted.type == "meta":
            return layer
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for ours, parameter in own.items():
            entry, layout = self.entries[ours], layout_of(parameter)
            value = fetch(self.source, ours, entry, layout, grid.tensor.rank, grid.tensor.size)
            value = value.to(wanted, torch.promote_types(parameter.dtype, value.dtype)).contiguous()
            filled[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            filled[parameter].__dict__.update(parameter.__dict__)
        for module in layer.modules():
            for name, old in module._parameters.items():
                if old is not None:
                    module._parameters[name] = filled[old]
        return layer


def _self_loading(specs: Sequence[Any], source: Source, names: Names) -> list[LayerSpec]:
    """The same specs, of classes that load themselves."""
    entries = expand(names, layer_count(source.config))
    if left := unused(source, entries.values()):
        raise ValueError(f"{_some(left)} of {source.where} go nowhere: add them to names")
    _same(source, specs)
    first: dict[Any, _Loaded] = {}
    loading: list[LayerSpec] = []
    for index, spec in enumerate(specs):
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"layer {index} is a {type(spec).__name__}, built already: list LayerSpec(cls, ...)")
        key = (spec.key, spec.cls) if isinstance(spec, TiedLayerSpec) else index
        cls = first.setdefault(key, _Loaded(spec.cls, index, source, entries))
        new = object.__new__(type(spec))
        new.__dict__.update(spec.__dict__, cls=cls)
        loading.append(new)
    return loading


def _checked(
    module: nn.Module, source: Source, names: Names | None, held: bool
) -> dict[nn.Parameter, tuple[str, Entry]]:
    """What each of a module's parameters is made of; nothing is read or written before all is known.

    Args:
        held: an engine holds the parameters, which may show nothing of themselves.
    """
    own = named(module)
    entries = _entries(module, source, names)
    if left := unused(source, entries.values()):
        raise ValueError(f"{_some(left)} of {source.where} go nowhere: add them to names")
    _same(source, getattr(module, "specs", ()))
    layers = {".".join(name.split(".")[:2]) + "." for name in own if name.startswith("layers.")}
    for prefix in layers if hugging_face(module)[0] is None else ():
        _no_more(source, entries, own, prefix)
    made_of = {}
    for ours, parameter in own.items():
        empty = parameter.is_meta or (parameter.numel() > 1 and not any(parameter.stride()))
        if empty and not held:
            raise RuntimeError(
                f"{ours} has no values yet, or another holds them: build the model from the layers of load_hf(path), "
                "or call model.fill() first; of a model that an engine trains pass the engine"
            )
        made_of[parameter] = ours, _entry(entries, ours, module)
        check(source, *made_of[parameter], layout_of(parameter))
    return made_of


@torch.no_grad()
def _fill(made_of: Mapping[nn.Parameter, tuple[str, Entry]], source: Source, grid: Grid, assign: Any) -> None:
    """Give parameters their values; through ``assign``, where an engine holds them."""
    for parameter, (ours, entry) in made_of.items():
        value = fetch(source, ours, entry, layout_of(parameter), grid.tensor.rank, grid.tensor.size)
        if assign is not None:
            assign(parameter, value)
        else:
            parameter.copy_(value)


def _entries(module: nn.Module, source: Source, names: Names | None) -> dict[str, Entry]:
    """What each parameter of ours is made of: as ``names`` say; the same name; or as the family's table says."""
    blocks = layer_count(source.config)
    if names is not None:
        return expand(names, blocks)
    theirs, prefix = hugging_face(module)
    if theirs is not None:
        return {prefix + name: Entry((name,)) for name in theirs.state_dict()}  # what is tied, under every name
    if (wrapped := wrapping(module)) is not None:
        return expand(wrapped.names(), blocks)
    return expand(names_of(source.config.get("model_type")), blocks)


def _entry(entries: Mapping[str, Entry], ours: str, layer: nn.Module) -> Entry:
    if ours not in entries:
        near = [name for name in entries if name.rpartition(".")[0] == ours.rpartition(".")[0]] or list(entries)[:4]
        raise ValueError(
            f"names do not say what {ours} (of a {type(layer).__name__}) is in Hugging Face's model; they have "
            f"{', '.join(near)}: pass names={{{ours!r}: '...', ...}}"
        )
    return entries[ours]


def _no_more(source: Source, entries: Mapping[str, Entry], own: Mapping[str, Any], prefix: str) -> None:
    """Refuse weights of a layer that it has no parameter for: a bias, say."""
    for ours, entry in entries.items():
        if ours.startswith(prefix) and ours not in own and find(source, entry.theirs[0]) is not None:
            raise ValueError(
                f"{source.where} has {entry.theirs[0]}, and here there is no {ours} to take it: build the model that "
                "its config.json describes, config_from_hf(path)"
            )


def _same(source: Source, specs: Sequence[Any]) -> None:
    """Refuse a model of ours that would compute something else with the same weights."""
    ours = next((a for s in specs for a in getattr(s, "args", ()) if isinstance(a, (GPTConfig, LlamaConfig))), None)
    if ours is None or source.config.get("model_type") not in FAMILIES:
        return
    if differing := same_model(ours, from_hf(source.config)):
        raise ValueError(f"the model is not that of {source.where}: {differing}. Take config_from_hf(path)")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more weights" if len(names) > 6 else "")
