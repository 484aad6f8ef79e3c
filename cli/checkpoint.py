"""``triax checkpoint``: show, verify, export, compare, prune and import checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import CheckpointError, ConfigError, escaped
from ..base.files import check_output, read_text
from .foreign_options import Command
from .output import echo
from .verbs import group

if TYPE_CHECKING:
    from ..checkpoint.reader import Reader
    from ..checkpoint.snapshot import Snapshot

CHECKPOINTS = "checkpoints"  # folder of the checkpoints in the folder of a run of triax train

checkpoint = group("checkpoint")

Where = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a folder of checkpoints, of a run, or of a triax.Trainer's output, which means its last "
        "one. A path, or a URI as s3://bucket/run."
    ),
]


@checkpoint.command(cls=Command)
def show(path: Where, tensors: Annotated[bool, typer.Option(help="Print a line for each tensor.")] = True) -> None:
    """Show a checkpoint: its step, grid, versions and sizes, and then its tensors."""
    from ..base.tables import as_text, table

    reader = _open(path)
    index = reader.index
    grid = " x ".join(f"{size} {axis}" for axis, size in index.head["grid"].items())
    echo(f"{reader.path}: step {index.head['step']}, {f'saved on {grid}' if grid else 'imported'}")
    echo(", ".join(f"{name} {version}" for name, version in index.head["versions"].items()))
    identity = index.head.get("identity")
    if identity is not None:
        parent = identity["parent"]
        came = f", after step {parent['step']} of run {parent['run'] or '(unknown)'}" if parent else ""
        echo(f"run {identity['run']}, number {identity['order']} of its folder{came}")
    totals: dict[str, int] = {}
    rows = []
    for name, entry in index.tensors.items():
        kind = name.rpartition("/")[0] or name
        kind = "random" if kind.startswith("random") else kind
        totals[kind] = totals.get(kind, 0) + entry.bytes
        shape = " x ".join(map(str, entry.shape)) or "1"
        rows.append((escaped(name), entry.dtype, shape, f"{entry.bytes / 1e6:.3f}", len(entry.boxes)))
    files = sum(file.size for file in index.files.values())
    elements = sum(math.prod(tensor.shape) for name, tensor in index.tensors.items() if name.startswith("weights/"))
    echo(f"{elements:,} parameters; {len(index.tensors)} tensors in {len(index.files)} files of {files / 1e6:.3f} MB")
    echo(", ".join(f"{kind} {size / 1e6:.3f} MB" for kind, size in totals.items()))
    if tensors:
        echo(as_text(table(("tensor", "dtype", "shape", "MB", "boxes"), rows, left=3)))


@checkpoint.command(cls=Command)
def verify(path: Where) -> None:
    """Compare every byte with its checksum. Print damaged files and tensors; with any, the exit code is 1."""
    from ..checkpoint.format.folder import verify as problems

    reader = _open(path)
    faults = [*problems(reader.path, reader.index)]
    for problem in faults:
        echo(problem, err=True)
    if faults:
        raise typer.Exit(1)
    size = sum(file.size for file in reader.index.files.values())
    echo(f"{reader.path}: {len(reader.index.files)} files, {size / 1e6:.3f} MB, all as they were written")


@checkpoint.command(cls=Command)
def export(
    path: Where,
    target: Annotated[Path, typer.Argument(help="Path to write, as model.safetensors; for hf and dcp a folder.")],
    dtype: Annotated[str | None, typer.Option(help="dtype of weights, as bfloat16; default: as saved.")] = None,
    format: Annotated[
        str,
        typer.Option(
            help="safetensors: one file; hf: a folder for transformers; dcp: one for torch; or a package's own."
        ),
    ] = "safetensors",
    config: Annotated[
        Path | None, typer.Option(help="For hf: the model's config.json, if the checkpoint does not contain it.")
    ] = None,
    merge_lora: Annotated[
        bool,
        typer.Option("--merge-lora", help="For hf: add LoRA adapters to the weights; default: write them for PEFT."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="For hf: folder or id of the tokenizer; default: the one of the model's folder."),
    ] = None,
) -> None:
    """Write whole weights and buffers to one safetensors file, or to a folder for Hugging Face or torch.

    This is DeepSpeed's zero_to_fp32: without --dtype, master weights are written as they were saved, in fp32.
    """
    from ..base.dtypes import TORCH_NAMES
    from ..checkpoint.convert.export import export as write
    from ..checkpoint.convert.formats import export_model, exporter
    from ..checkpoint.format.folder import verify as problems

    if dtype is not None and (dtype not in TORCH_NAMES or not TORCH_NAMES[dtype].is_floating_point):
        raise ConfigError(f"--dtype is {dtype}, but it must be float32, float64, bfloat16 or float16.")
    plain, kept = format == "safetensors", None if dtype is None else TORCH_NAMES[dtype]
    make = None if plain else exporter(format)
    if plain and target.suffix != ".safetensors":
        raise ConfigError(
            f"The format safetensors writes one file, but {target} does not end in .safetensors. Give "
            f"{target.with_suffix('.safetensors')}, or --format hf for a folder."
        )
    if plain:
        check_output(target, (".safetensors",))
    if plain and (config is not None or merge_lora or tokenizer is not None):
        option = "--merge-lora" if merge_lora else "--config" if config is not None else "--tokenizer"
        raise ConfigError(f"You gave {option}, but it is used only with --format hf. Leave it out, or add --format hf.")
    reader = _open(path)
    for problem in problems(reader.path, reader.index):
        raise ConfigError(problem)
    snapshot = reader.snapshot
    if make is None:
        written = [*write(snapshot, target, kept)]
    else:
        written = [*export_model(make, snapshot, target, kept, config, merge_lora, tokenizer)]
    files = [target] if plain else [*target.glob("*.safetensors"), *target.glob("*.distcp")]
    echo(f"{target}: {len(written)} tensors, {sum(file.stat().st_size for file in files) / 1e6:.3f} MB")


@checkpoint.command(cls=Command)
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint.")], b: Annotated[str, typer.Argument(help="Another.")]
) -> None:
    """Compare two checkpoints: names, shapes, the largest difference of each tensor. Exit code 1 if they differ."""
    first, second = _open(a), _open(b)
    lines = differences(first.snapshot, second.snapshot)
    for line in lines:
        echo(line)
    if lines:
        raise typer.Exit(1)
    echo(f"{first.path} and {second.path} hold the same")


@checkpoint.command(cls=Command)
def prune(
    folder: Annotated[str, typer.Argument(help="A folder of checkpoints: a path, or a URI.")],
    keep: Annotated[int, typer.Option(min=1, help="Number of last checkpoints to keep.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
) -> None:
    """Remove all but the last checkpoints. The checkpoint that ``latest`` names is never removed."""
    from ..checkpoint.format.folder import prunable, remove
    from ..checkpoint.format.remote import folder_at
    from ..checkpoint.lineage import Lineage

    where = folder_at(folder)
    if isinstance(where, Path) and not where.is_dir():
        raise ConfigError(f"{folder} is not a folder. Give a folder of checkpoints.")
    try:
        if not dry_run:
            Lineage("prune").tidy_up(where)
        gone = prunable(where, keep)
        for tag in gone:
            if not dry_run:
                remove(where, tag)
            echo(f"{where / tag} {'would go' if dry_run else 'removed'}")
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error
    if not gone:
        echo(f"{folder}: nothing to remove")


@checkpoint.command("import", cls=Command)
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder of Megatron-LM, of torch.distributed.checkpoint, or DeepSpeed's universal format."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write the checkpoint to.")],
    tag: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "imported",
    weights: Annotated[str, typer.Option(help="DCP: prefix of the names of weights.")] = "model.",
    optimizer: Annotated[str, typer.Option(help="DCP: prefix of the names of optimizer state.")] = "optimizer.state.",
    buffers: Annotated[
        list[str] | None, typer.Option(help="Pattern of the names of buffers, as *.running_mean.")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="OLD=NEW: replace the beginning OLD of names by NEW.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Megatron: number of tokens, without the rows that pad the vocabulary.")
    ] = None,
    unpickle: Annotated[
        bool, typer.Option("--unpickle", help="Read pickles, which may run code: I trust their author.")
    ] = False,
) -> None:
    """Import a checkpoint of Megatron-LM, of torch (DCP) or of DeepSpeed (universal). The last two are unpickled."""
    from ..compat.megatron.checkpoint import find_megatron, import_megatron

    try:
        megatron = find_megatron(source)
        if megatron is not None:
            _written(folder / tag, import_megatron(megatron, folder, tag, vocab_size))
            return
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    source, is_dcp = _foreign(source)
    renames = dict(word.split("=", 1) for word in rename or [] if "=" in word)
    if len(renames) != len(rename or []):
        raise ConfigError(
            f"--rename {' --rename '.join(rename or [])} is not valid. Write OLD=NEW, and give each OLD once."
        )
    if not unpickle:
        what = f"{source / '.metadata'} is a pickle" if is_dcp else f"the files of {source} are pickles"
        raise ConfigError(
            f"{what}, and reading a pickle may run code that is in it. If you trust its author, pass --unpickle."
        )
    from ..checkpoint.convert.from_dcp import import_dcp
    from ..compat.deepspeed.universal_checkpoint import import_universal

    try:
        if is_dcp:
            left = import_dcp(source, folder, tag, weights, optimizer, buffers or [], renames)
        else:
            left = import_universal(source, folder, tag, buffers or [], renames)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    _written(folder / tag, left)


def _written(path: Path, left: list[str]) -> None:
    echo(f"{path} written" + (f"; left out: {', '.join(left)}" if left else ""))


def _foreign(source: Path) -> tuple[Path, bool]:
    """Return the folder of another library's checkpoint, and True for torch's (DCP), False for DeepSpeed's."""
    named = source / "latest_universal"
    if named.is_file():
        source = source / read_text(named).strip()
    if (source / ".metadata").is_file():
        return source, True
    if (source / "zero").is_dir():
        return source, False
    if [*source.glob("*_optim_states.pt")]:
        raise ConfigError(
            f"{source} has the files of DeepSpeed's ranks, but only DeepSpeed's universal format can be imported. Type "
            f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {source} --output_folder "
            f"{source}_universal, and import {source}_universal."
        )
    raise ConfigError(
        f"{source} is not a checkpoint that can be imported. A checkpoint of torch.distributed.checkpoint has a file "
        ".metadata, one in DeepSpeed's universal format has a folder zero, and one of Megatron-LM has folders "
        "mp_rank_00 or a file metadata.json."
    )


def differences(a: Snapshot, b: Snapshot) -> list[str]:
    """Return a line for each difference of two checkpoints."""
    import torch

    lines = []
    headers = [{**index.header, "numbers": index.numbers} for index in (a, b)]
    for key in ("step", "run", "client_state", "numbers"):
        one, other = (header.get(key) for header in headers)
        if isinstance(one, dict) and isinstance(other, dict):
            title = "" if key == "run" else f"{key}/"
            names = dict.fromkeys([*one, *other])
            lines += [f"{title}{n}: {one.get(n)} | {other.get(n)}" for n in names if one.get(n) != other.get(n)]
        elif one != other:
            lines.append(f"{key}: {one} | {other}")
    for name in dict.fromkeys([*a.tensors, *b.tensors]):
        first, second = a.tensors.get(name), b.tensors.get(name)
        if first is None or second is None:
            lines.append(f"{name}: only in {(b if first is None else a).source}")
        elif first.shape != second.shape:
            lines.append(f"{name}: {first.shape} | {second.shape}")
        else:
            x, y = first.read_all(), second.read_all()
            dtypes = "" if x.dtype == y.dtype else f", {x.dtype} | {y.dtype}".replace("torch.", "")
            if dtypes or not torch.equal(x, y):
                wide = (x.double() - y.double()).abs() if x.is_floating_point() or x.dtype != torch.bool else x ^ y
                most = float(wide.max()) if wide.numel() else 0.0
                lines.append(
                    f"{name}: {int((wide != 0).sum())} of {x.numel()} differ, by {most:.3g} at the most{dtypes}"
                )
    return lines


def _open(where: str) -> Reader:
    from ..base.errors import CorruptError
    from ..checkpoint.format.folder import last, readable_path
    from ..checkpoint.format.index import NAME, read_index
    from ..checkpoint.format.remote import folder_at
    from ..checkpoint.reader import Reader

    found_at = path = folder_at(where)
    try:
        if not any((path / name).is_file() for name in (NAME, "latest")):
            saves = [file.parent for file in path.glob("checkpoint-*/latest")] if isinstance(path, Path) else []
            numbers = {int(number): save for save in saves if (number := save.name.partition("-")[2]).isdecimal()}
            if (path / CHECKPOINTS / "latest").is_file():
                found_at = path = path / CHECKPOINTS
            elif numbers:  # the output folder of a triax.Trainer
                found_at = path = numbers[max(numbers)]
        if not (path / NAME).is_file():
            tag, note = (None, "") if isinstance(path, Path) and not path.is_dir() else last(path)
            if note:
                echo(note, err=True)
            if tag is None and isinstance(path, Path) and not path.exists():
                raise ConfigError(f"there is no folder {path}")
            if tag is None:
                raise ConfigError(f"{path} is not a checkpoint: it has no {NAME}, and no file 'latest' that names one.")
            found_at = readable_path(path, tag)
        return Reader(found_at, read_index(found_at))
    except (CorruptError, CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error
