"""``save_hf``: a model of ours as a folder that ``transformers`` reads, gathered one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import Grid, Layout, layout_of
from .config import GPTConfig, LlamaConfig
from .hf_config import layer_count, to_hf
from .hf_names import Entry, Names, expand, names_of
from .hf_write import FolderWriter

__all__ = ["Held", "agree", "hugging_face", "named", "parts_of", "save_hf", "split", "wrapping"]


class Held(NamedTuple):
    """A parameter of the whole model."""

    layout: Layout
    dtype: torch.dtype
    owner: int  # the first rank of the pipe axis that holds it


@torch.no_grad()
def save_hf(
    model: Any,
    path: str | Path,
    *,
    config: GPTConfig | LlamaConfig | Mapping[str, Any] | None = None,
    names: Names | None = None,
    grid: Grid | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder for ``from_pretrained``: ``config.json``, and the weights in safetensors. Collective.

    Rank 0 writes. It holds one whole tensor at a time; in stage 3 of ZeRO a layer is gathered besides.

    Args:
        model: an ``Engine``, a ``PipelineModule`` of ``gpt`` or ``llama``, or a Hugging Face model that ``parallelize``
            sharded (the one layer of an engine's, perhaps).
        path: of the folder, which is made. Weights of an earlier model there are removed.
        config: of ours, or the whole content of ``config.json``; None: found in the model.
        names: as in ``load_hf``, for other families.
        grid: of a module that does not keep its own.
        dtype: of what is written; None: each weight's own. (Under bf16 an engine's weights are bf16.)
        max_file_bytes: weights are written to several files beyond that.

    Raises:
        ValueError: the model's configuration, its grid or a name is not known; the message says what to pass.
        RuntimeError: on every rank, where rank 0 could not write.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(f"save_hf writes an engine's or a module's weights, not those of a {type(model).__name__}")
    grid = grid or getattr(model, "grid", None)
    if grid is None:
        raise ValueError(f"a {type(model).__name__} does not keep its grid: pass save_hf(module, path, grid=grid)")
    lend: Callable[[list[nn.Parameter]], AbstractContextManager[None]] = getattr(model, "gathered", None) or (
        lambda parameters: nullcontext()
    )
    writer, failure = None, None
    with agree(grid):
        own = named(module)
        for name, parameter in own.items():
            released = parameter.numel() > 1 and not any(parameter.stride())
            if parameter.is_meta or (released and not hasattr(model, "gathered")):
                raise RuntimeError(
                    f"{name} is not here: save the engine that trains this model, save_hf(engine, path), or within "
                    "zero.gathered(module)"
                )
        held = _everything(own, grid)
        theirs, prefix = hugging_face(module)
        written = _config(module, theirs, config)
        entries = {name: Entry((name.removeprefix(prefix),)) for name in held}
        if names is not None or theirs is None:
            wrapped = wrapping(module)
            known = names_of(written.get("model_type")) if wrapped is None and names is None else None
            entries = expand(names or known or wrapped.names(), layer_count(written))
        plan = {name: parts_of(name, h, entries, dtype) for name, h in held.items()}
        if grid.rank == 0:
            tensors = {part: (shape, kind) for parts in plan.values() for part, shape, kind in parts}
            kinds = {kind for _, kind in tensors.values()}
            said = str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")
            writer = FolderWriter(Path(path), {**written, "dtype": said}, tensors, max_file_bytes)
    for _, layer in groupby(held, key=lambda name: name.split(".")[:2]):
        group = list(layer)
        mine = [own[name] for name in group if held[name].owner == grid.pipe.rank]
        with lend(mine) if mine else nullcontext():
            for name in group:
                whole = _whole(own.get(name), held[name], grid)
                if writer is not None and whole is not None and failure is None:
                    try:
                        _write(writer, whole, plan[name], entries[name])
                    except Exception as error:  # the others wait in the next collective: they hear of it at the end
                        failure = error
    with agree(grid):
        if writer is not None:
            writer.close()
        if failure is not None:
            raise RuntimeError(f"rank 0 could not write {path}: {failure}") from failure


def hugging_face(module: Any) -> tuple[Any, str]:
    """The Hugging Face model that a module is, or has for its one layer, and what stands before its names; or None."""
    specs: Any = getattr(module, "specs", ())
    inner, prefix = (specs[0], "layers.0.") if len(specs) == 1 else (module, "")
    return (inner, prefix) if hasattr(getattr(inner, "config", None), "to_dict") else (None, "")


def wrapping(module: Any) -> Any:
    """What the layers of ``hf_layers`` say of the model that they are parts of; None where there are none."""
    arguments = (value for spec in getattr(module, "specs", ()) for value in getattr(spec, "args", ()))
    return next((value for value in arguments if hasattr(value, "family") and hasattr(value, "names")), None)


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters, each once, by their whole-model names."""
    return {layout_of(p).name or name: p for name, p in module.named_parameters()}


@contextmanager
def agree(grid: Grid) -> Iterator[None]:
    """What fails within on one rank fails on every rank. Collective."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    said = grid.world.all_gather_object(None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    if other := next((text for text in said if text is not None), None):
        raise RuntimeError(f"on another rank: {other}")


def _everything(own: Mapping[str, nn.Parameter], grid: Grid) -> dict[str, Held]:
    """Every parameter of the model, in its order."""
    mine = [(name, layout_of(p), p.dtype) for name, p in own.items()]
    held: dict[str, Held] = {}
    for owner, listed in enumerate(grid.pipe.all_gather_object(mine)):
        for name, layout, dtype in listed:
            held.setdefault(name, Held(layout, dtype, owner))
    return held


def _config(module: nn.Module, theirs: Any, config: Any) -> dict[str, Any]:
    """What ``config.json`` says, but for the dtype."""
    if config is None and theirs is not None:
        config = theirs.config.to_dict()
        config["architectures"] = config.get("architectures") or [type(theirs).__name__]
    if config is None:
        candidates = (value for spec in getattr(module, "specs", ()) for value in getattr(spec, "args", ()))
        config = next((value for value in candidates if isinstance(value, (GPTConfig, LlamaConfig))), None)
    if config is None and (wrapped := wrapping(module)) is not None:
        config = {**wrapped.config.to_dict(), "architectures": [wrapped.architecture]}
    if config is None:
        raise ValueError(
            "the model does not tell its configuration: pass save_hf(model, path, config=GPTConfig(...)), or the "
            "content of config.json as a dict"
        )
    return to_hf(config) if isinstance(config, (GPTConfig, LlamaConfig)) else dict(config)


def parts_of(
    name: str, held: Held, entries: Mapping[str, Entry], dtype: torch.dtype | None
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """What is written of one parameter: names, shapes and dtypes."""
    if name not in entries:
        raise ValueError(
            f"names do not say what {name} is in Hugging Face's model: pass names={{{name!r}: '...', ...}}"
        )
    entry, layout = entries[name], held.layout
    lengths = list(layout.parts or ())
    if len(lengths) != len(entry.theirs):  # not fused for the tensor axis, or all of it one tensor of theirs
        length, rest = divmod(layout.shape[0], len(entry.theirs))
        if rest:
            raise ValueError(f"{name} {layout.shape} is not {len(entry.theirs)} equal parts: {', '.join(entry.theirs)}")
        lengths = [length] * len(entry.theirs)
    shapes = [(length, *layout.shape[1:]) for length in lengths]
    if entry.transposed:
        shapes = [shape[::-1] for shape in shapes]
    return [(theirs, shape, dtype or held.dtype) for theirs, shape in zip(entry.theirs, shapes, strict=True)]


def _whole(parameter: nn.Parameter | None, held: Held, grid: Grid) -> Tensor | None:
    """A whole tensor on rank 0; whoever does not hold it or pass it on returns None."""
    if not grid.data.is_first:
        return None
    whole: Tensor | None = None
    layout, axis = held.layout, grid.tensor
    if grid.pipe.rank == held.owner:
        assert parameter is not None
        whole = parameter.detach()
        if layout.sharded and axis.size > 1:
            sizes = [torch.Size(layout.local_shape(rank, axis.size)) for rank in range(axis.size)]
            most = max(size.numel() for size in sizes)
            mine = F.pad(whole.reshape(-1), [0, most - whole.numel()]).contiguous()
            gathered = mine.new_empty(axis.size * most)
            axis.all_gather(gathered, mine)
            shards = [flat[: size.numel()].view(size) for flat, size in zip(gathered.split(most), sizes, strict=True)]
            whole = layout.assemble(shards)
    if not axis.is_first:
        return None
    if held.owner > 0:
        if whole is None:
            whole = torch.empty(layout.shape, dtype=held.dtype, device=grid.device)
        whole = whole.contiguous()
        grid.pipe.broadcast(whole, source=held.owner)
    return whole


def _write(
    writer: FolderWriter, whole: Tensor, parts: list[tuple[str, tuple[int, ...], torch.dtype]], entry: Entry
) -> None:
    for theirs, piece in split(whole, parts, entry):
        writer.write(theirs, piece)


def split(
    whole: Tensor, parts: list[tuple[str, tuple[int, ...], torch.dtype]], entry: Entry
) -> Iterator[tuple[str, Tensor]]:
    """What is written of a whole parameter: names and values."""
    lengths = [shape[-1 if entry.transposed else 0] for _, shape, _ in parts]
    pieces = whole.split(lengths) if whole.dim() else (whole,)
    for (theirs, _, dtype), piece in zip(parts, pieces, strict=True):
        yield theirs, (piece.t() if entry.transposed else piece).to(dtype)
