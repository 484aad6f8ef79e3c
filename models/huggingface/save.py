"""A model under the names of ``transformers``, gathered one tensor at a time; ``save_hf``, which writes a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import astuple
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...base.checks import check_path
from ...grid import Grid, Layout, layout_of
from ...grid.agreement.agreement import agreed, begin_call
from ...tensor_parallel.lora import LoraOptions
from ...tensor_parallel.quantized import ComputedWeight, QuantizedNumbers
from ..config import TransformerConfig
from ..reward import has_reward_head
from .config import as_reward, to_hf
from .config import entries as expanded
from .folder_settings import settings_of, write_settings
from .folder_writer import FolderWriter, TensorSink
from .merge_adapters import Merge, is_factor, merges
from .names import Entry, Names, swapped


class Held(NamedTuple):
    """Description of one parameter of the whole model, which this rank may or may not hold.

    ``owner`` is the first rank of the pipe axis that holds it.
    """

    layout: Layout
    dtype: torch.dtype
    owner: int  # the first rank of the pipe axis that holds it


@torch.no_grad()
def save_hf(
    model: Any,
    path: str | Path,
    *,
    config: TransformerConfig | Mapping[str, Any] | None = None,
    names: Names | None = None,
    grid: Grid | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    merge_lora: bool = False,
    tokenizer: Any = None,
) -> None:
    """Write a folder for ``from_pretrained``: ``config.json``, and the weights in safetensors. Collective.

    Rank 0 writes the files, and holds one whole tensor at a time. Under ZeRO stage 3 a layer is gathered in addition.
    The ids of special tokens, ``generation_config.json``, the tokenizer's files and its chat template are those of the
    folder or the model that ``load_hf`` read.

    >>> layers = triax.llama_layers(triax.LlamaConfig.preset("llama-tiny"))
    >>> triax.save_hf(triax.PipelineModule(layers), "runs/llama")
    >>> sorted(os.listdir("runs/llama"))
    ['config.json', 'model.safetensors']

    Args:
        model: an ``Engine``, a ``PipelineModule`` of triax's layers, or a Hugging Face model that ``parallelize``
            sharded. This model may be the only layer of an engine's ``PipelineModule``.
        path: path of the folder, which is created. The files take the place of an earlier model's in this folder
            together: after an error, or if the process is killed, the earlier model is there.
        config: the configuration, for example a ``LlamaConfig``, or the whole content of ``config.json``. If None, the
            configuration is taken from the model.
        names: table of parameter names as in ``load_hf``, for models of other families.
        grid: the grid of a module that has no attribute with its grid.
        dtype: dtype of the written weights. If None, each weight keeps its dtype (bf16 for an engine under bf16).
        max_file_bytes: maximum size of a file. Weights with more bytes are written to several files.
        merge_lora: merge the weights with the model's active adapters. ``save_lora`` writes the adapters.
        tokenizer: a ``transformers`` tokenizer, a folder with its files, a ``tokenizer.json``, or an id of the Hub;
            None: that of the model, if it had one.

    Raises:
        ValueError: the model's configuration, its grid or a name is unknown, or the model has adapters and
            ``merge_lora`` is not set. The message says what to pass.
        RuntimeError: rank 0 could not write. The error is raised on every rank.
    """
    check_path("save_hf", path=path)
    own: dict[str, Any] = {"config": config, "names": names, "grid": grid, "dtype": dtype, "merge_lora": merge_lora}
    weights = HuggingFaceWeights(model, **own)
    writer, failure = None, None
    with agreed(weights.grid, None):
        if weights.grid.rank == 0:
            writer = FolderWriter(Path(path), weights.config, weights.shapes, max_file_bytes)
    with ExitStack() as end:
        if writer is not None:
            end.callback(writer.files.end)
        for name, tensor in weights:
            if writer is None or tensor is None or failure is not None:
                continue
            try:
                writer.write_tensor(name, tensor)
            except Exception as error:  # the others wait in the next collective: they hear of it at the end
                failure = error
        with agreed(weights.grid, None):
            if writer is not None:
                with writer.files as folder:
                    if failure is not None:
                        raise RuntimeError(f"rank 0 could not write {path}: {failure}") from failure
                    writer.close()
                    write_settings(folder, settings_of(weights.module), tokenizer)


class HuggingFaceWeights:
    """Weights of a model, under the names and in the shapes of Hugging Face's model, gathered one tensor at a time.

    Making one and iterating over it are collective: every rank iterates to the end. An iteration gives the weights of
    that moment: (name, tensor) on rank 0, and (name, None) on the other ranks, in the same order. Rank 0 holds one
    whole parameter of triax, once more if its dtype changes; under ZeRO stage 3 a layer is gathered in addition. A
    tensor is valid until the iteration goes on.

    Args:
        model, config, names, grid, dtype, merge_lora: as for ``save_hf``.

    Attributes:
        module, grid: the module and its grid.
        config: content of ``config.json``, without the dtype.
        shapes: name -> (shape, dtype) of each tensor, in the order of an iteration.

    Raises:
        ValueError, RuntimeError: on every rank, as ``save_hf``: the model cannot be written.
    """

    def __init__(
        self,
        model: Any,
        *,
        config: TransformerConfig | Mapping[str, Any] | None = None,
        names: Names | None = None,
        grid: Grid | None = None,
        dtype: torch.dtype | None = None,
        merge_lora: bool = False,
    ) -> None:
        module, self.grid = module_and_grid(model, grid, "save_hf(module, path, grid=grid)")
        self.module, self._model = module, model
        begin_call(self.grid, "save_hf")
        options: dict[str, LoraOptions] | None = getattr(module, "lora_options", None)
        active = getattr(module, "lora_active", ())
        self._scalings = {name: adapter.scaling for name, adapter in (options or {}).items() if name in active}
        with agreed(self.grid, None):
            own = named_weights(module)
            if options is not None and not merge_lora:
                raise ValueError(
                    "the model has LoRA adapters, which the model of config.json does not have. Pass merge_lora=True "
                    "to add them to the weights, or write only them with triax.save_lora(model, path)."
                )
            for name, parameter in own.items():
                released = parameter.numel() > 1 and not any(parameter.stride())
                if parameter.is_meta or (released and not hasattr(model, "gathered")):
                    raise RuntimeError(
                        f"{name} has no values, because ZeRO stage 3 or an engine holds them. Pass the engine, "
                        "save_hf(engine, path), or call save_hf within zero.gathered(module)."
                    )
            self.config = written_config(module, config)
            self._entries = entries = entries_of(module, names, self.config)
            buffers = named_buffers(module)
            self._values: dict[str, Tensor] = {**own, **{name: b for name, b in buffers.items() if name in entries}}
            self._held = held = held_everywhere(self._values, self.grid)
            stray = [n for n, b in buffers.items() if n.endswith("correction_bias") and n not in entries and b.any()]
            if stray:
                raise ValueError(
                    f"{stray[0]} is not 0, but Hugging Face's {self.config.get('model_type')} has no bias for the "
                    "selection of experts. Train without balance='bias', or write a family that has it, deepseek_v3."
                )
            plan = {name: parts_of(name, h, entries, dtype) for name, h in held.items() if not is_factor(name)}
        self._plan, self.shapes = plan, announced(plan, entries)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the name and the tensor of each weight. Collective.

        Raises:
            Exception: at the end, on every rank, if a tensor could not be made.
        """
        ends: dict[str, list[str]] = {}  # triax's name -> the tensors that are whole with it
        names = (
            (file_name, name)
            for name, parts in self._plan.items()
            for part, _, _ in parts
            for file_name in (part, *self._entries[name].again)
        )
        for file_name, name in dict(names).items():
            ends.setdefault(name, []).append(file_name)
        factors: dict[str, Tensor] = {}
        transposed = transposed_layers(self.config) if self._scalings else set[str]()
        made, failure = _Collected(self.shapes), None
        for name, gathered in whole_tensors(self._model, self._values, self._held, self.grid):
            if is_factor(name):
                if self.grid.rank == 0 and gathered is not None:
                    factors[name] = gathered
                continue
            if self.grid.rank:
                yield from ((ended, None) for ended in ends.get(name, ()))
                continue
            try:
                if gathered is not None and self._plan[name] and failure is None:
                    changes = merges(name, self._entries[name], factors, self._scalings, transposed)
                    write_parts(made, gathered, self._plan[name], self._entries[name], changes)
            except Exception as error:  # the others wait in the next collective: they hear of it at the end
                failure = error
            while made.tensors:
                yield made.tensors.pop(0)
        with agreed(self.grid, None):
            if failure is not None:
                raise failure


class _Collected(TensorSink):
    """Tensors that are made, and not taken yet."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__(shapes)
        self.tensors: list[tuple[str, Tensor]] = []

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        self.tensors.append((name, tensor))


def whole_tensors(
    model: Any, values: Mapping[str, Tensor], held: Mapping[str, Held], grid: Grid
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name and the unsharded tensor of each parameter, in order, a layer's adapters first. Collective.

    Args:
        model: an engine or a module.
        values: name -> this rank's shard.
        held: name -> description, of the parameters of all ranks.
        grid: the grid.

    Yields:
        Name, and on rank 0 the unsharded tensor, which may change when the iteration goes on unless it is a factor of
        an adapter; on other ranks a tensor or None, which is not used.
    """
    lend: Callable[[list[nn.Parameter]], AbstractContextManager[None]] = getattr(model, "gathered", None) or (
        lambda parameters: nullcontext()
    )
    for _, layer in groupby(held, key=lambda name: name.split(".")[:2]):
        group = sorted(layer, key=lambda name: not is_factor(name))
        here = [values[name] for name in group if held[name].owner == grid.pipe.rank and name in values]
        own_parameters = [value for value in here if isinstance(value, nn.Parameter)]
        own_parameters += [p for value in here if isinstance(value, ComputedWeight) for p in value.numbers.parameters()]
        with lend(own_parameters) if own_parameters else nullcontext():
            for name in group:
                tensor = _whole(values.get(name), held[name], grid)
                yield name, tensor.clone() if tensor is not None and is_factor(name) else tensor


def module_and_grid(model: Any, grid: Grid | None, call: str) -> tuple[nn.Module, Grid]:
    """Return a model's module and its grid; ``model`` is a module or an engine.

    The grid is ``grid`` or, if it is None, the model's attribute ``grid``. ``call`` is the call that error messages
    tell the user to write.

    Raises:
        TypeError: ``model`` is neither a module nor an engine.
        ValueError: no grid is given, and the model has no attribute with its grid.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}, not an nn.Module or an engine. Write {call}.")
    grid = grid or getattr(model, "grid", None)
    if grid is None:
        raise ValueError(f"a {type(model).__name__} does not know its grid. Write {call}.")
    return module, grid


def entries_of(module: nn.Module, names: Names | None, config: Mapping[str, Any]) -> dict[str, Entry]:
    """Return triax's name -> Hugging Face's tensors, for each parameter of a module.

    For a Hugging Face model that ``parallelize`` sharded the names are equal. Otherwise they come from ``names`` or, if
    it is None, from the table of the model's family.

    Args:
        module: the model.
        names: table of the caller, or None.
        config: content of ``config.json``, which gives the family and the number of blocks.
    """
    theirs, prefix = hugging_face(module)
    if names is None and theirs is not None:
        return {prefix + name: Entry((name,)) for name in theirs.state_dict(keep_vars=True)}  # tied: every name
    if names is None:
        wrapped = wrapping(module)
        names = None if wrapped is None else wrapped.names()
    return expanded(names, config)


def linear_names(module: nn.Module, names: Names | None = None) -> dict[str, tuple[str, ...]]:
    """Return the name of each layer with a weight -> its names in transformers' model, one for each fused part.

    The result is {} if transformers has no such model. ``names`` is a table of the caller, or None.
    """
    try:
        entries = entries_of(module, names, written_config(module, None))
    except ValueError:
        return {}
    return names_of_layers(entries)


def names_of_layers(entries: Mapping[str, Entry]) -> dict[str, tuple[str, ...]]:
    """Return the name of each layer with a weight -> its names in transformers' model, of a model's ``entries``.

    Layers that are a part of one layer there are left out.
    """
    ending = ".weight"
    return {
        ours.removesuffix(ending): tuple(theirs.removesuffix(ending) for theirs in entry.live or entry.theirs)
        for ours, entry in entries.items()
        if ours.endswith(ending) and entry.theirs and not entry.per_expert and not entry.rows
    }


def transposed_layers(config: Mapping[str, Any]) -> set[str]:
    """Return transformers' names of the layers that keep their weight as (inputs, outputs): a ``Conv1D``.

    ``config`` is the content of ``config.json``.
    """
    try:
        entries = expanded(None, config)
    except ValueError:
        return set()
    return {name.removesuffix(".weight") for entry in entries.values() if entry.transposed for name in entry.theirs}


def hugging_face(module: Any) -> tuple[Any, str]:
    """Return the Hugging Face model in a module, and the prefix of the names of its parameters.

    The model is the module itself or its only layer. None is returned for it if neither is a Hugging Face model.
    """
    specs: Any = getattr(module, "layer_specs", ())
    inner, prefix = (specs[0], "layers.0.") if len(specs) == 1 else (module, "")
    return (inner, prefix) if hasattr(getattr(inner, "config", None), "to_dict") else (None, "")


def config_of(specs: Sequence[Any]) -> TransformerConfig | None:
    """Return the first ``TransformerConfig`` among the arguments of layers' specs; None if there is none."""
    arguments = (value for spec in specs for value in getattr(spec, "args", ()))
    return next((value for value in arguments if isinstance(value, TransformerConfig)), None)


def wrapping(module: Any) -> Any:
    """Return the ``HFModel`` that a module's layers share if ``hf_layers`` made them, else None."""
    arguments = (value for spec in getattr(module, "layer_specs", ()) for value in getattr(spec, "args", ()))
    return next((value for value in arguments if hasattr(value, "family") and hasattr(value, "names")), None)


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return whole-model name -> parameter of a module, with each tied parameter once, without a loss function's."""
    by_layout_name = {layout_of(p).name or name: p for name, p in module.named_parameters()}
    return {name: parameter for name, parameter in by_layout_name.items() if not name.startswith("loss_fn.")}


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return ``named(module)`` with one computed weight in place of the integers of each quantized weight."""
    computed: dict[int, Tensor] = {}
    for holder in module.modules():
        integers = holder._modules.get("quantized")
        if isinstance(integers, QuantizedNumbers):
            computed |= {id(number): vars(holder)["weight"] for number in integers.parameters()}
    weights: dict[str, Tensor] = {}
    for name, parameter in named(module).items():
        layer, _, numbers = name.partition(".quantized.")
        weights[f"{layer}.weight" if numbers else name] = computed.get(id(parameter), parameter)
    return weights


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return whole-model name -> buffer of a pipeline's layers: biases of routers, loads."""
    if hugging_face(module)[0] is not None:
        return {}
    return {name: buffer for name, buffer in module.named_buffers() if not name.startswith("loss_fn.")}


def held_everywhere(own: Mapping[str, Tensor], grid: Grid) -> dict[str, Held]:
    """Return name -> description of the parameters of all pipe ranks, in order. Collective over the pipe axis."""
    own_facts = [(name, astuple(layout_of(p)), p.dtype) for name, p in own.items()]
    held: dict[str, Held] = {}
    for owner, listed in enumerate(grid.pipe.all_gather_json(own_facts)):
        for name, layout, dtype in listed:
            held.setdefault(name, Held(Layout(*layout), dtype, owner))
    return held


def written_config(module: nn.Module, config: Any) -> dict[str, Any]:
    """Return the content of the ``config.json`` to write, without the dtype: ``config`` or, if None, the model's.

    Raises:
        ValueError: neither has a configuration.
    """
    theirs, _ = hugging_face(module)
    if config is None and theirs is not None:
        config = theirs.config.to_dict()
        config["architectures"] = config.get("architectures") or [type(theirs).__name__]
    if config is None:
        config = config_of(getattr(module, "layer_specs", ()))
    if config is None and (wrapped := wrapping(module)) is not None:
        config = {**wrapped.config.to_dict(), "architectures": [wrapped.architecture]}
    if config is None:
        raise ValueError(
            "the model has no configuration that can be written. Pass save_hf(model, path, config=GPTConfig(...)), or "
            "the content of config.json as a dict."
        )
    if not isinstance(config, TransformerConfig):
        return dict(config)
    written = to_hf(config, settings_of(module))
    return as_reward(written) if has_reward_head(getattr(module, "layer_specs", ())) else written


def parts_of(
    name: str, held: Held, entries: Mapping[str, Entry], dtype: torch.dtype | None
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return (Hugging Face's name, shape, dtype) of each tensor to write for one parameter of triax.

    A fused parameter is written as several tensors.

    Args:
        name: triax's name of the parameter.
        held: its layout and dtype.
        entries: triax's name -> Hugging Face's tensors.
        dtype: dtype to write; None: the parameter's.

    Raises:
        ValueError: ``entries`` lacks the name, or the parameter cannot be divided into that many tensors.
    """
    if name not in entries:
        raise ValueError(
            f"names have no entry for {name}. Add Hugging Face's name of it, names={{{name!r}: '...', ...}}."
        )
    entry, layout = entries[name], held.layout
    if not entry.theirs:
        return []
    if entry.rows:
        return [(entry.theirs[0], (entry.of, *layout.shape[1:]), dtype or held.dtype)]
    experts, *one = layout.shape if entry.per_expert else (1, *layout.shape)
    lengths, count = list(layout.parts or ()), len(entry.theirs) // experts
    if len(lengths) != count:  # not fused for the tensor axis, or all of it one tensor of theirs
        length, rest = divmod(one[0], count)
        if rest or count * experts != len(entry.theirs):
            parts = ", ".join(entry.theirs)
            raise ValueError(f"{name} {layout.shape} cannot be divided into {len(entry.theirs)} equal parts: {parts}")
        lengths = [length] * count
    shapes: list[tuple[int, ...]] = [(length, *one[1:]) for length in lengths] * experts
    if entry.one_row:
        shapes = [(1, *shape) for shape in shapes]
    if entry.transposed:
        shapes = [swapped(shape) for shape in shapes]
    return [(theirs, shape, dtype or held.dtype) for theirs, shape in zip(entry.theirs, shapes, strict=True)]


def _whole(parameter: Tensor | None, held: Held, grid: Grid) -> Tensor | None:
    """Gather the shards of a parameter and send it to pipe rank 0. Collective over the ranks of the first replica.

    Args:
        parameter: this rank's shard; None on pipe ranks that do not hold it.
        held: its description.
        grid: the grid.

    Returns:
        The unsharded tensor on rank 0. The result on other ranks, a tensor or None, is not used.
    """
    layout, axis = held.layout, grid.tensor
    if not grid.axis(layout.replicas).is_first:
        return None
    gathered: Tensor | None = None
    if grid.pipe.rank == held.owner:
        assert parameter is not None
        own_shard = parameter.dense() if isinstance(parameter, ComputedWeight) else parameter.detach()
        gathered = layout.gather(axis, own_shard, grid.expert)
    if not (axis.is_first and grid.data_context.is_first):
        return None
    if held.owner > 0:
        if gathered is None:
            gathered = torch.empty(layout.shape, dtype=held.dtype, device=grid.device)
        gathered = gathered.contiguous()
        grid.pipe.broadcast(gathered, source=held.owner)
    return gathered


def announced(
    plan: Mapping[str, Sequence[tuple[str, tuple[int, ...], torch.dtype]]], entries: Mapping[str, Entry]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> shape and dtype of the tensors of all parameters, in the order in which they are written.

    A tensor of which several parameters have rows is written when the last of them is there.

    Args:
        plan: triax's names, in order -> what ``parts_of`` returns.
        entries: triax's name -> Hugging Face's tensors.
    """
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, parts in plan.items():
        for part, shape, kind in parts:
            for file_name in (part, *entries[name].again):
                shapes.pop(file_name, None)
                shapes[file_name] = shape, kind
    return shapes


def write_parts(
    writer: TensorSink,
    whole: Tensor,
    parts: list[tuple[str, tuple[int, ...], torch.dtype]],
    entry: Entry,
    merges: Sequence[Merge | None],
) -> None:
    """Cut an unsharded parameter into the tensors that ``parts_of`` lists, and write them in order.

    ``merges`` has for each of them a function that merges it with an adapter, or None.
    """
    if entry.rows:
        (theirs, _, dtype), merge = parts[0], merges[0]
        writer.write_rows(theirs, (whole if merge is None else merge(whole)).to(dtype), entry.rows)
        return
    lengths = [(swapped(shape) if entry.transposed else shape)[entry.one_row] for _, shape, _ in parts]
    if entry.per_expert:
        pieces = [piece for expert in whole for piece in expert.split(lengths[: entry.per_expert])]
    else:
        pieces = list(whole.split(lengths)) if whole.dim() else [whole]
    for (theirs, _, dtype), piece, merge in zip(parts, pieces, merges, strict=True):
        piece = piece if merge is None else merge(piece)
        piece = piece.transpose(-1, -2) if entry.transposed and piece.dim() > 1 else piece
        piece = piece[None] if entry.one_row else piece
        for name in (theirs, *entry.again):
            writer.write_tensor(name, piece.to(dtype))
