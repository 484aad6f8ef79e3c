"""The loader of packed rows beside torch's DataLoader over `datasets`, on the same tokens of the same text.

    python benchmarks/data.py                            # rows of 1,024 and 4,096 tokens, 15 rounds
    python benchmarks/data.py --lengths 512 --rounds 3

The text is the source of Python's standard library, tokenized once by a BPE tokenizer of 8,192 entries that is trained
on it. All contenders make microbatches of 8 rows in one process, from memory-mapped files, in a random order:

triax                 TokenData with threads=0: inputs, document numbers and labels, documents in a new order each epoch
triax, no masks       document_mask=False: the same without using the document numbers
datasets, blocks      as transformers' run_clm.py: documents joined and cut into blocks once, by Dataset.map; items are
                      blocks with their labels. No masks of documents, whose order is fixed in the blocks
datasets, documents   items are documents in a new order each epoch; a collate function in numpy packs them into rows
                      with document numbers and labels, as triax's are

A round reads as many batches from each, in turn, and counts the seconds of CPU of the whole process: "tokens a second
and core". The ratio is to the best of the contenders of `datasets` in the same round.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from limits import ratios, spread
from measuring import in_turn
from rounds import parser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import corpus

from triax.base.tables import table, terminal
from triax.data import TokenData, TokenFolder, tokenize, train_tokenizer
from triax.data.sources import Reading, find_sources

ROWS = 8  # in a microbatch
Next = Callable[[], Any]  # makes the next microbatch


def prepare(folder: Path, files: int, vocab_size: int) -> TokenFolder:
    """Tokenize the text."""
    source = folder / "text.jsonl"
    with source.open("w") as lines:
        for file in corpus.find()[:files]:
            text = file.path.read_text(errors="ignore")
            if text:
                lines.write(json.dumps({"text": text}) + "\n")
    train_tokenizer(find_sources([source])[0], Reading(), vocab_size, folder / "tokenizer")
    return tokenize([source], folder / "tokenizer", folder / "tokens").folder


def forever(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from make()


def blocks(documents: Any, length: int) -> Next:
    """The preparation of transformers' run_clm.py: ``group_texts``, once."""

    def group(batch: dict[str, Any]) -> dict[str, Any]:
        joined = np.concatenate(batch["input_ids"])
        joined = joined[: len(joined) // length * length].reshape(-1, length)
        return {"input_ids": joined, "labels": joined.copy()}

    cut = documents.with_format("numpy").map(group, batched=True, batch_size=1000).with_format("torch")
    loader = torch.utils.data.DataLoader(cut, batch_size=ROWS, shuffle=True, drop_last=True)
    batches = forever(lambda: loader)
    assert next(batches)["labels"].shape == (ROWS, length)
    return lambda: next(batches)


def packed(documents: Any, length: int) -> Next:
    """Documents packed on the way, without any Python per token."""
    held: list[np.ndarray[Any, Any]] = []
    loader = torch.utils.data.DataLoader(
        documents.with_format("numpy"), batch_size=1, shuffle=True, collate_fn=lambda items: items[0]["input_ids"]
    )
    source = forever(lambda: loader)

    def make() -> Any:
        parts, numbers, labels, room, number = [], [], [], ROWS * length, 0
        while room:
            whole = held.pop() if held else next(source)
            tokens, rest = whole[:room], whole[room:]
            parts.append(tokens)
            numbers.append(np.full(len(tokens), number))
            follow = np.append(whole[1 : len(tokens) + 1], [-100] * (len(whole) == len(tokens)))
            labels.append(follow)
            room, number = room - len(tokens), number + 1
            if len(rest):
                held.append(rest)
        made = [np.concatenate(each).astype(np.int64).reshape(ROWS, length) for each in (parts, numbers, labels)]
        ids, places, targets = map(torch.from_numpy, made)
        return (ids, places - places[:, :1]), targets

    assert make()[1].shape == (ROWS, length)
    return make


def contenders(folder: TokenFolder, length: int) -> Iterator[tuple[str, Next]]:
    for name, masks in (("triax", True), ("triax, no masks", False)):
        loader = TokenData(folder.path, length, document_mask=masks).loader(ROWS, ROWS, threads=0)
        next(loader)
        yield name, loader.__next__
    try:
        import datasets
    except ImportError:
        return
    datasets.disable_progress_bars()
    saved = folder.path.parent / "datasets"
    if not saved.exists():
        rows = ({"input_ids": folder.document(number).astype(np.int32)} for number in range(folder.index.documents))
        features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
        datasets.Dataset.from_list([*rows], features=features).save_to_disk(str(saved))
    opened = datasets.load_from_disk(str(saved))
    yield "datasets, blocks", blocks(opened, length)
    yield "datasets, documents", packed(opened, length)


def measure(folder: TokenFolder, length: int, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Return the tokens a second and core of each contender in each round."""
    rates: dict[str, list[float]] = {}
    running = [*contenders(folder, length)]
    count = max(1, tokens // (ROWS * length))
    for name, make in in_turn(running, rounds):
        begin = time.process_time()
        for _ in range(count):
            make()
        rates.setdefault(name, []).append(count * ROWS * length / (time.process_time() - begin))
    return rates


def show(length: int, rates: dict[str, list[float]]) -> None:
    """Print a table."""
    peers = [name for name in rates if name.startswith("datasets")] or [*rates]
    best = max(peers, key=lambda name: median(rates[name]))
    heads = ("", "million tokens a second and core", f"ratio to {best}")
    rows = (
        (name, spread([each / 1e6 for each in mine], ".3g"), spread(ratios(mine, rates[best]), ".3g"))
        for name, mine in rates.items()
    )
    terminal(width=110).print(table(heads, rows, f"rows of {length:,} tokens, {ROWS} a microbatch"))


def main() -> None:
    arguments = parser(__doc__, rounds=15, ranks=False)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    arguments.add_argument("--tokens", type=int, default=2_000_000, help="that each contender makes in a round")
    arguments.add_argument("--files", type=int, default=2000, help="of the standard library")
    arguments.add_argument("--vocab-size", type=int, default=8192)
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        folder = prepare(Path(path), options.files, options.vocab_size)
        index = folder.index
        results = {n: measure(folder, n, options.rounds, options.tokens) for n in options.lengths}
    if options.json:
        print(json.dumps({"tokens": index.tokens, "documents": index.documents, "results": results}))
        return
    print(f"{index.tokens:,} tokens in {index.documents:,} documents")
    for length, rates in results.items():
        show(length, rates)


if __name__ == "__main__":
    main()
