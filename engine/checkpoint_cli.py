"""``triax checkpoint``: what is in a checkpoint, whether it is whole, its weights in one file, what may go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .config_base import ConfigError

if TYPE_CHECKING:
    from .checkpoint_index import Index
    from .checkpoint_read import Reader

checkpoint = typer.Typer(
    name="checkpoint", help="Look at, check, convert and tidy up checkpoints.", no_args_is_help=True
)

Where = Annotated[Path, typer.Argument(help="A checkpoint, or the folder it was saved in: the last one of it.")]


@checkpoint.command()
def show(path: Where, tensors: Annotated[bool, typer.Option(help="A line for each tensor.")] = True) -> None:
    """What a checkpoint holds: where the run was, its tensors with their sizes."""
    from rich.console import Console
    from rich.table import Table

    reader = _open(path)
    index, out = reader.index, Console(soft_wrap=True, highlight=False)
    grid = " x ".join(f"{size} {axis}" for axis, size in index.head["grid"].items())
    out.print(f"{reader.path}: step {index.head['step']}, {f'saved on {grid}' if grid else 'imported'}")
    out.print(", ".join(f"{name} {version}" for name, version in index.head["versions"].items()))
    totals: dict[str, int] = {}
    table = Table(title_justify="left")
    for name, side in (("tensor", "left"), ("dtype", "left"), ("shape", "left"), ("MB", "right"), ("boxes", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for name, entry in index.tensors.items():
        kind = name.rpartition("/")[0] or name
        kind = "random" if kind.startswith("random") else kind
        totals[kind] = totals.get(kind, 0) + entry.bytes
        shape = " x ".join(map(str, entry.shape)) or "1"
        table.add_row(name, entry.dtype, shape, f"{entry.bytes / 1e6:.3f}", str(len(entry.boxes)))
    if tensors:
        out.print(table)
    for kind, size in totals.items():
        out.print(f"{kind}: {size / 1e6:.3f} MB")
    files = sum(file.size for file in index.files.values())
    out.print(f"{len(index.files)} files of {files / 1e6:.3f} MB; {_elements(index):,} parameters")


@checkpoint.command()
def verify(path: Where) -> None:
    """Hold every byte against its checksum. What is damaged is named, and the exit code is 1."""
    from .checkpoint_folder import verify as problems

    reader = _open(path)
    found = [*problems(reader.path, reader.index)]
    for problem in found:
        typer.echo(problem, err=True)
    if found:
        raise typer.Exit(1)
    size = sum(file.size for file in reader.index.files.values())
    typer.echo(f"{reader.path}: {len(reader.index.files)} files, {size / 1e6:.3f} MB, all as they were written")


@checkpoint.command()
def export(
    path: Where,
    target: Annotated[Path, typer.Argument(help="What to write: model.safetensors, say; a folder for --format hf.")],
    dtype: Annotated[str | None, typer.Option(help="Of weights, as bfloat16; that in which they are kept.")] = None,
    format: Annotated[
        str, typer.Option(help="safetensors: one file; hf: a folder for transformers; another that a package offers.")
    ] = "safetensors",
    config: Annotated[
        Path | None, typer.Option(help="For hf: the model's config.json, where the checkpoint does not tell.")
    ] = None,
) -> None:
    """Write whole weights and buffers, one tensor after the other: to one safetensors file, or for Hugging Face."""
    from .checkpoint_export import export as write
    from .checkpoint_file import DTYPES
    from .checkpoint_folder import verify as problems
    from .checkpoint_model import export_model, exporter

    if dtype is not None and (dtype not in DTYPES or not DTYPES[dtype].is_floating_point):
        raise ConfigError(f"--dtype {dtype} is none of float32, float64, bfloat16 and float16")
    plain, kept = format == "safetensors", None if dtype is None else DTYPES[dtype]
    make = None if plain else exporter(format)
    if plain and target.suffix != ".safetensors":
        raise ConfigError(
            f"{target}: what is written is in the format of safetensors: give {target.with_suffix('.safetensors')}, or "
            "--format hf for a folder"
        )
    if plain and config is not None:
        raise ConfigError("--config is for --format hf")
    reader = _open(path)
    for problem in problems(reader.path, reader.index):
        raise ConfigError(problem)
    written = write(reader, target, kept) if make is None else export_model(make, reader, target, kept, config)
    files = [target] if plain else sorted(target.glob("*.safetensors"))
    typer.echo(f"{target}: {len(written)} tensors, {sum(file.stat().st_size for file in files) / 1e6:.3f} MB")


@checkpoint.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint.")], b: Annotated[Path, typer.Argument(help="Another.")]
) -> None:
    """Where two checkpoints differ: names, shapes, how far each tensor. The exit code is 1 if they do."""
    first, second = _open(a), _open(b)
    lines = [*differences(first, second)]
    for line in lines:
        typer.echo(line)
    if lines:
        raise typer.Exit(1)
    typer.echo(f"{first.path} and {second.path} hold the same")


@checkpoint.command()
def prune(
    folder: Annotated[Path, typer.Argument(help="Where checkpoints were saved.")],
    keep: Annotated[int, typer.Option(min=1, help="How many of the last ones stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove all but the last checkpoints. That which ``latest`` names stays in any case."""
    from .checkpoint_folder import prunable, remove

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    gone = prunable(folder, keep)
    for tag in gone:
        if not dry_run:
            remove(folder, tag)
        typer.echo(f"{folder / tag} {'would go' if dry_run else 'removed'}")
    if not gone:
        typer.echo(f"{folder}: nothing to remove")


@checkpoint.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(help="A folder of torch.distributed.checkpoint's, or one in DeepSpeed's universal format.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write a checkpoint.")],
    tag: Annotated[str, typer.Option(help="Its name there.")] = "imported",
    weights: Annotated[str, typer.Option(help="DCP: what stands before the names of weights.")] = "model.",
    optimizer: Annotated[
        str, typer.Option(help="DCP: and before those of the optimizer's state.")
    ] = "optimizer.state.",
    buffers: Annotated[list[str] | None, typer.Option(help="Names, as *.running_mean, of what is a buffer.")] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="OLD=NEW: names that begin with OLD begin with NEW here.")
    ] = None,
    unpickle: Annotated[bool, typer.Option("--unpickle", help="I trust whoever wrote it: it may run code.")] = False,
) -> None:
    """Make a checkpoint of torch's distributed checkpoint (DCP) or DeepSpeed's universal one, which are pickles."""
    source, is_dcp = _foreign(source)
    renames = dict(word.split("=", 1) for word in rename or [] if "=" in word)
    if len(renames) != len(rename or []):
        raise ConfigError(f"--rename {' --rename '.join(rename or [])}: write OLD=NEW, each OLD once")
    if not unpickle:
        what = f"{source / '.metadata'} is a pickle" if is_dcp else f"the files of {source} are pickles"
        raise ConfigError(
            f"{what}, and reading one runs whatever code it holds: if you trust whoever wrote it, pass --unpickle"
        )
    from .checkpoint_import import import_dcp
    from .checkpoint_universal import import_universal

    try:
        if is_dcp:
            left = import_dcp(source, folder, tag, weights, optimizer, buffers or [], renames)
        else:
            left = import_universal(source, folder, tag, buffers or [], renames)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    typer.echo(f"{folder / tag} written" + (f"; left out: {', '.join(left)}" if left else ""))


def _foreign(source: Path) -> tuple[Path, bool]:
    """The folder of a checkpoint of others, and whether it is DCP's."""
    named = source / "latest_universal"
    if named.is_file():
        source = source / named.read_text(encoding="utf-8").strip()
    if (source / ".metadata").is_file():
        return source, True
    if (source / "zero").is_dir():
        return source, False
    if [*source.glob("*_optim_states.pt")]:
        raise ConfigError(
            f"{source} is as DeepSpeed's ranks wrote it: make it universal first, python -m "
            f"deepspeed.checkpoint.ds_to_universal --input_folder {source} --output_folder {source}_universal, and "
            "import that"
        )
    raise ConfigError(
        f"{source} is no folder of torch.distributed.checkpoint, which has a file .metadata, and none in DeepSpeed's "
        "universal format, which has a folder zero"
    )


def differences(a: Reader, b: Reader) -> list[str]:
    """A line for each thing in which two checkpoints differ."""
    import torch

    lines = []
    for key in ("step", "run", "client_state", "numbers"):
        one, other = a.index.head.get(key), b.index.head.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            title = "" if key == "run" else f"{key}/"
            names = dict.fromkeys([*one, *other])
            lines += [f"{title}{n}: {one.get(n)} | {other.get(n)}" for n in names if one.get(n) != other.get(n)]
        elif one != other:
            lines.append(f"{key}: {one} | {other}")
    for name in dict.fromkeys([*a.index.tensors, *b.index.tensors]):
        one, other = a.index.tensors.get(name), b.index.tensors.get(name)
        if one is None or other is None:
            lines.append(f"{name}: only in {(b if one is None else a).path}")
        elif one.shape != other.shape:
            lines.append(f"{name}: {one.shape} | {other.shape}")
        else:
            x, y = a.whole(name), b.whole(name)
            kinds = "" if one.dtype == other.dtype else f", {one.dtype} | {other.dtype}"
            if kinds or not torch.equal(x, y):
                wide = (x.double() - y.double()).abs() if x.is_floating_point() or x.dtype != torch.bool else x ^ y
                most = float(wide.max()) if wide.numel() else 0.0
                lines.append(
                    f"{name}: {int((wide != 0).sum())} of {x.numel()} differ, by {most:.3g} at the most{kinds}"
                )
    return lines


def _open(path: Path) -> Reader:
    from .checkpoint_file import CorruptError
    from .checkpoint_folder import latest, place
    from .checkpoint_index import NAME, read_index
    from .checkpoint_read import Reader

    found: Any = path
    if not (path / NAME).is_file():
        tag = latest(path) if path.is_dir() else None
        if tag is None:
            raise ConfigError(f"{path} is no checkpoint (it has no {NAME}), and has no file 'latest' that names one")
        found = place(path, tag)
    try:
        return Reader(found, read_index(found))
    except (CorruptError, OSError) as error:
        raise ConfigError(str(error)) from error


def _elements(index: Index) -> int:
    import math

    return sum(math.prod(e.shape) for name, e in index.tensors.items() if name.startswith("weights/"))
