"""``triax data``: text made into tokens on disk, shown and verified; tokenizers trained."""

from __future__ import annotations

import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import ConfigError, CorruptError
from .foreign_options import Command
from .output import echo, printable
from .verbs import group

if TYPE_CHECKING:
    from ..data.token_folder import TokenFolder

data = group("data")

Sources = Annotated[
    list[str],
    typer.Argument(
        help="Text files, .jsonl, .parquet and .arrow files, folders of them, or hf://datasets/ORG/NAME, optionally "
        "followed by @REVISION and /PATH.",
        metavar="SOURCE",
    ),
]
Output = Annotated[Path, typer.Option(help="Folder to write.")]
Where = Annotated[Path, typer.Argument(help="Folder that triax data tokenize wrote.")]
Key = Annotated[
    str | None, typer.Option(help="Name of the text in .jsonl, or of the column. Default: text, or messages.")
]
Split = Annotated[str, typer.Option(help="Documents of a text file: the file, each line, or each paragraph.")]
Format = Annotated[
    str | None, typer.Option(help="Format of all files: text, jsonl, parquet or arrow. Default: by name.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out documents that are empty or not valid.")]


@data.command(cls=Command)
def tokenize(
    sources: Sources,
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a tokenizer.json, a folder of transformers, or an id, as Qwen/Qwen3-0.6B.")
    ],
    output: Output,
    processes: Annotated[int, typer.Option(min=0, help="Number of processes. 0: one for each core.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Conversations: loss on the assistant's tokens only.")] = False,
    key: Key = None,
    split: Split = "file",
    format: Format = None,
    end: Annotated[
        str | None, typer.Option(help="Token that ends a document, or none. Default: the tokenizer's own.")
    ] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Tokenize text into a folder. After an interruption, the same command continues."""
    from ..data.sources import find_sources
    from ..data.tokenization import tokenize as run
    from ..grid.launcher.launch import cores

    _, left = find_sources(sources, format)
    begin = last = time.perf_counter()

    def show_progress(done: int, of: int) -> None:
        nonlocal last
        if done < of and time.perf_counter() - last > 2:
            last = time.perf_counter()
            echo(f"{done} of {of} pieces, {last - begin:.0f} s", err=True)

    try:
        made = run(
            [*sources],
            tokenizer,
            output,
            processes=processes or cores(),
            key=key,
            chat=chat,
            split=split,
            format=format,
            end=end,
            skip_bad=skip_bad,
            progress=show_progress,
        )
    except (CorruptError, OSError) as error:
        raise ConfigError(_line(error)) from error
    if left:
        echo(f"left out files: {', '.join(f'{count} {reason}' for reason, count in left.items())}", err=True)
    if made.bad:
        echo(f"left out {made.bad} documents; the first: {made.first_bad}", err=True)
    index = made.folder.index
    if index.tokenizer.end is None and index.kind == "text":
        echo("nothing ends a document, because the tokenizer names no such token; give one by --end", err=True)
    seconds = time.perf_counter() - begin
    how = f"in {seconds:.1f} s" if made.pieces else "there already"
    echo(f"{output}: {index.tokens:,} tokens in {index.documents:,} documents, {how}")


@data.command(cls=Command)
def show(
    path: Where,
    document: Annotated[int | None, typer.Option(min=0, help="Print this document, from 0, and its source.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer to print a document with. Default: the one that made the tokens.")
    ] = None,
) -> None:
    """Show a folder of tokens: its tokenizer, sizes and lengths of documents; or the text of one document."""
    import numpy as np

    folder = _open(path)
    index, made = folder.index, folder.index.tokenizer
    if document is not None:
        _show_document(folder, document, tokenizer)
        return
    size = sum(file.bytes for file in index.files)
    echo(f"{path}: {index.tokens:,} tokens in {index.documents:,} documents, {len(index.files)} files")
    echo(f"{size / 1e6:.3f} MB, tokens as {index.dtype}, {index.kind}")
    echo(f"tokenizer {made.name}: {made.vocab_size} entries, fingerprint {made.fingerprint[:12]}, end {made.end}")
    echo(f"largest token {folder.largest}")
    lengths = np.diff(folder.starts)
    low, middle, high = (int(np.quantile(lengths, at, method="nearest")) for at in (0, 0.5, 1))
    echo(f"documents of {low:,} to {high:,} tokens, median {middle:,}")
    if index.kind == "chat":
        counted = sum(int(file.counted.sum(dtype=np.int64)) for file in folder.files if file.counted is not None)
        echo(f"{counted:,} tokens count in the loss")


@data.command(cls=Command)
def verify(path: Where) -> None:
    """Compare every byte with its checksum. Print damaged files; with any, the exit code is 1."""
    try:
        folder = _open(path)
        problems = [*folder.verify()]
    except ConfigError as error:
        problems = [str(error)]
    for problem in problems:
        echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
    files = folder.index.files
    size = sum(file.bytes for file in files)
    echo(f"{path}: {len(files)} files, {size / 1e6:.3f} MB, all as they were written")


@data.command("train-tokenizer", cls=Command)
def train_tokenizer(
    sources: Sources,
    output: Output,
    vocab_size: Annotated[
        int, typer.Option(help="Number of tokens: 256 bytes, the end of a document, merges.")
    ] = 32000,
    key: Key = None,
    split: Split = "file",
    format: Format = None,
    skip_bad: SkipBad = False,
) -> None:
    """Train a byte-level BPE tokenizer on text, and write a folder that transformers can load too."""
    from ..data.sources import Reading, find_sources
    from ..data.tokenizer import train_tokenizer as train

    files, _ = find_sources(sources, format)
    made = train(files, Reading(key or "text", False, split), vocab_size, output, skip_bad=skip_bad).facts
    if made.vocab_size < vocab_size:
        echo(f"the text has only {made.vocab_size} tokens to learn, fewer than {vocab_size}", err=True)
    echo(f"{output}: {made.vocab_size} tokens, of {len(files)} files; fingerprint {made.fingerprint[:12]}")


def _show_document(folder: TokenFolder, number: int, name: str | None) -> None:
    from ..data.tokenizer import open_tokenizer

    tokens, origin, counted = folder.document(number), folder.origin(number), folder.counted(number)
    tokenizer = open_tokenizer(name or folder.index.tokenizer.name)
    folder.check_tokenizer(tokenizer.facts)
    echo(f"document {number}, {origin}: {len(tokens):,} tokens", err=True)
    if counted is None:
        typer.echo(printable(tokenizer.decode(tokens.tolist())))
        return
    bold = sys.stdout.isatty()
    edges = [0, *(i for i in range(1, len(counted)) if counted[i] != counted[i - 1]), len(counted)]
    for start, stop in pairwise(edges):
        text = printable(tokenizer.decode(tokens[start:stop].tolist()))
        typer.echo(typer.style(text, bold=True) if bold and counted[start] else text, nl=False)
    echo()
    echo(f"{Counter(counted.tolist())[1]:,} tokens count in the loss{' (bold)' if bold else ''}", err=True)


def _open(path: Path) -> TokenFolder:
    from ..data.token_folder import TokenFolder

    try:
        return TokenFolder(path)
    except (CorruptError, OSError) as error:
        raise ConfigError(_line(error)) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
