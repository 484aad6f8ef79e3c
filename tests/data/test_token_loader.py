"""Packed rows of tokenized documents: their contents, their order, and the same batches on every grid."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import triax
from triax import GPTConfig, Grid, NextTokenLoss, PipelineModule, gpt_layers
from triax.base.errors import ConfigError, CorruptError
from triax.data import TokenData, TokenFolder, TokenLoader
from triax.data.mixture import BLOCK, Mixture
from triax.data.packing import best_fit, hashes, permute
from triax.data.tokenization import tokenize
from triax.models.packed import pack

from support.tokenized import as_filled, documents_in, folder, rows_of, texts, write_json_lines

COUNT = 120


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: Any) -> Path:
    return folder(tmp_path_factory.mktemp("tokens"), COUNT)


@pytest.mark.parametrize("length", [1, 7, 64, 10_000])
def test_loader_rows_equal_those_of_pack(tokens: Path, length: int) -> None:
    """The models' own ``pack``, which goes token by token, makes the same rows."""
    opened = TokenFolder(tokens)
    plain = [opened.document(number).tolist() for number in range(COUNT)]
    assert [bytes(each).rstrip(b"\0").decode() for each in plain] == texts(COUNT)
    loader = TokenData(tokens, length, shuffle=False).loader(8, 4, epochs=1, threads=0)
    ids, documents, labels = rows_of(loader)
    (wanted, numbers), follow = pack(plain, length)
    count = len(wanted)
    assert count == loader.rows.count and len(ids) == -(-count // 8) * 8 == len(loader) * 4
    assert torch.equal(ids[:count], wanted) and torch.equal(labels[:count], follow)
    assert torch.equal(documents[:count], numbers - numbers[:, :1])
    assert bool((labels[count:] == -100).all())
    assert all(each.dtype == torch.int64 for each in (ids, documents, labels))


@pytest.mark.parametrize("packing", ["cut", "whole"])
@pytest.mark.parametrize("length", [24, 300])
def test_every_document_is_read_once_on_any_replica_count(tokens: Path, packing: str, length: int) -> None:
    wanted = Counter(texts(COUNT))
    data = TokenData(tokens, length, packing=packing)
    alone = [rows_of(data.loader(8, 2, seed=5, epochs=2, threads=threads)) for threads in (0, 1, 3)]
    for other in alone[1:]:
        assert all(torch.equal(a, b) for a, b in zip(alone[0], other, strict=True))
    count = data.rows(5).count
    epochs = [tuple(each[e * count : (e + 1) * count] for each in alone[0]) for e in range(2)]
    if packing == "cut":
        assert [documents_in(*as_filled(data, 5, e, rows)) for e, rows in enumerate(epochs)] == [wanted] * 2
    assert not torch.equal(epochs[0][0], epochs[1][0])
    if packing == "whole":
        fits = Counter({text: 1 for text in wanted if len(text) < length})
        found = [Counter({t: n for t, n in _whole(*epoch).items() if t in fits}) for epoch in epochs]
        assert found == [fits] * 2
    for replicas in (1, 2, 4):
        parts = [[*data.loader(8, 2, replica, replicas, seed=5, epochs=2)] for replica in range(replicas)]
        per = len(parts[0]) // (len(alone[0][0]) // 8)
        joined = [batch for step in range(len(parts[0]) // per) for part in parts for batch in part[step * per :][:per]]
        assert all(torch.equal(a, b) for a, b in zip(rows_of(joined), alone[0], strict=True))


def _whole(ids: Tensor, documents: Tensor, labels: Tensor) -> Counter[str]:
    """Count the documents that lie whole in a row."""
    found: Counter[str] = Counter()
    for row, numbers, follow in zip(ids.numpy(), documents.numpy(), labels.numpy(), strict=True):
        for number in range(int(numbers[-1]) + 1):
            inside = numbers == number
            if follow[inside][-1] == -100:
                found[bytes(row[inside].tolist()).rstrip(b"\0").decode()] += 1
    return found


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_the_loader_resumes_bitwise_on_any_number_of_replicas(tokens: Path, packing: str) -> None:
    """Runs that stop after each step, and go on with other numbers of replicas, batch sizes and threads.

    They have the rows of one run that never stops, and in them every document of each epoch once.
    """
    data = TokenData(tokens, 32, packing=packing, held_out=0.2)
    whole = data.loader(4, 1, seed=2)
    straight = rows_of(islice(whole, 4 * 60))
    whole.close()
    assert 2 * whole.rows.count < 4 * 60  # more than two epochs
    shapes = [(4, 1, 1), (8, 2, 2), (4, 4, 1), (8, 1, 4), (12, 2, 1), (8, 4, 2)]  # train, micro, replicas
    state: dict[str, Any] = {}
    taken: list[tuple[Tensor, Tensor, Tensor]] = []
    at = 0
    for turn in range(24):
        train, micro, replicas = shapes[turn % len(shapes)]
        loaders = [data.loader(train, micro, r, replicas, seed=2, threads=turn % 3) for r in range(replicas)]
        if state:
            for loader in loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
                assert loader.state_dict() == state
        found = rows_of(batch for loader in loaders for batch in islice(loader, train // replicas // micro))
        assert all(torch.equal(a, b[at : at + train]) for a, b in zip(found, straight, strict=True))
        taken.append(found)
        at += train
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states) and states[0]["row"] == at
        state = states[0]
    count, joined = whole.rows.count, tuple(torch.cat(part) for part in zip(*taken, strict=True))
    held = documents_in(
        *rows_of(TokenData(tokens, 50, held_out=0.2, part="held_out", shuffle=False).loader(1, 1, epochs=1))
    )
    wanted = Counter(texts(COUNT)) - held
    for epoch in range(2):
        rows = tuple(part[epoch * count : (epoch + 1) * count] for part in joined)
        if packing == "cut":
            assert documents_in(*as_filled(data, 2, epoch, rows)) == wanted
        else:
            assert {text: n for text, n in _whole(*rows).items() if text in wanted} == {
                text: 1 for text in wanted if len(text) < 32
            }
    # A batch that was read in part is read again; other ranks go along.
    loader, other = data.loader(8, 2, seed=2), data.loader(8, 2, seed=2)
    first = rows_of(islice(loader, 6))
    other.advance(6)
    assert loader.state_dict() == other.state_dict() == {**state, "row": 8}
    loader.load_state_dict(loader.state_dict())
    assert all(torch.equal(a[:4], b[8:]) for a, b in zip(rows_of(islice(loader, 2)), first, strict=True))
    loader.seek(0)
    assert all(torch.equal(a, b) for a, b in zip(rows_of(islice(loader, 6)), first, strict=True))
    assert loader.seeks == 2 and loader.epoch == 8 / loader.rows.count


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_advance_drops_microbatches_that_were_made_ahead(tokens: Path, threads: int) -> None:
    """``advance(3)`` leaves a loader where reading three microbatches leaves it, whatever its threads have ready."""
    data = TokenData(tokens, 50)
    every = [rows_of([batch]) for batch in islice(data.loader(8, 2, seed=2, threads=0), 9)]
    loader = data.loader(8, 2, seed=2, threads=threads)
    for number in (0, 4, 8):
        found = rows_of([next(loader)])
        assert all(torch.equal(a, b) for a, b in zip(found, every[number], strict=True)), number
        loader.advance(3)
    loader.close()


def test_hashes_equal_the_published_splitmix64_values() -> None:
    """SplitMix64 with its published test vector. It may never change: runs resume from its orders."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert hashes(1234567, 4).tolist() == published
    firsts = [int(np.argsort(hashes(seed, 5))[0]) for seed in range(1000)]
    assert np.bincount(firsts).min() > 150


def test_permute_returns_a_permutation_for_every_count() -> None:
    """Every count of rows has a permutation, which a seed chooses. It may never change either."""
    for count in [*range(1, 70), 255, 256, 257, 5000, 9000]:
        assert sorted(permute(np.arange(count), count, 7).tolist()) == [*range(count)]
    assert permute(np.arange(10), 10, 1).tolist() == [9, 0, 5, 6, 2, 3, 4, 1, 8, 7]
    far = permute(np.arange(5), 10**12, 1)
    assert far.tolist() == [468748914215, 599911487438, 376415632499, 682553105116, 933834728334]
    places = np.array([permute(np.arange(50), 50, seed) for seed in range(2000)])
    counts = np.array([np.bincount(column, minlength=50) for column in places.T])  # (row, place)
    assert np.abs(counts - 40).max() < 6 * 40**0.5 and len({*map(tuple, places.tolist())}) == 2000


def test_a_long_document_does_not_fill_a_batch(tmp_path: Path) -> None:
    """A quarter of the rows is one document's: of 32 rows in a batch, about 8 are."""
    lines = ["x" * 4096, *("y" * 30 for _ in range(400))]
    tokenize([write_json_lines(tmp_path / "long.jsonl", lines)], "bytes", tmp_path / "long")
    loader = TokenData(tmp_path / "long", 16).loader(32, 32, seed=3, epochs=1)
    long = [int((ids == ord("x")).all(1).sum()) for (ids, _), _ in loader]
    assert sum(long) >= 255 and max(long) < 20 and min(long[:-1]) > 0


def test_a_long_document_is_predicted_across_its_rows(tmp_path: Path) -> None:
    """Of a document longer than a row each token but the last predicts the next one, also the last of a row."""
    file = write_json_lines(tmp_path / "long.jsonl", ["abcdefghijklmnopqrs"])
    tokenize([file], "bytes", tmp_path / "out")
    tokens = TokenFolder(tmp_path / "out").document(0).tolist()
    ids, _, labels = rows_of(TokenData(tmp_path / "out", 8, packing="whole", shuffle=False).loader(3, 3, epochs=1))
    assert ids.flatten()[: len(tokens)].tolist() == tokens
    assert labels.flatten()[: len(tokens)].tolist() == [*tokens[1:], -100]


def test_held_out_documents_depend_on_their_texts_alone(tokens: Path, tmp_path: Path) -> None:
    parts = {
        part: documents_in(
            *rows_of(TokenData(tokens, 50, held_out=0.3, part=part, shuffle=False).loader(1, 1, epochs=1))
        )
        for part in ("training", "held_out")
    }
    assert parts["training"] + parts["held_out"] == Counter(texts(COUNT))
    assert 20 < len(parts["held_out"]) < 52
    more = folder(tmp_path, 2 * COUNT)  # the same texts, and others
    grown = documents_in(
        *rows_of(TokenData(more, 50, held_out=0.3, part="held_out", shuffle=False).loader(1, 1, epochs=1))
    )
    assert {text for text in grown if text in texts(COUNT)} <= set(parts["held_out"]) | set(texts(2 * COUNT)[COUNT:])
    assert len(_of_part(tokens, 1e-9, "held_out")) == 1  # at least one


def _of_part(path: Path, held_out: float, part: str) -> Counter[str]:
    """Count the documents of a part."""
    data = TokenData(path, 50, held_out=held_out, part=part, shuffle=False)
    return documents_in(*rows_of(data.loader(1, 1, epochs=1)))


def test_folders_are_joined_or_mixed_by_weights(tokens: Path, tmp_path: Path) -> None:
    other = folder(tmp_path, 40, seed=9)
    both = TokenData([tokens, other], 32, shuffle=False).loader(2, 2, epochs=1)
    assert documents_in(*rows_of(both)) == Counter(texts(COUNT)) + Counter(texts(40, 9))

    mixed = TokenData({str(tokens): 3, str(other): 1}, 32)
    loader = mixed.loader(4, 4, seed=1)
    ids, _, _ = rows_of(islice(loader, 40))
    members = [TokenData(each, 32).loader(1, 1, seed=1) for each in (tokens, other)]
    single = [rows_of(islice(member, 160))[0] for member in members]
    taken = [0, 0]
    for row in ids:  # each row is the next one of a member, in the members' own orders, past their epochs
        which = next(m for m in (0, 1) if torch.equal(row, single[m][taken[m]]))
        taken[which] += 1
        assert abs(taken[0] - 3 * taken[1]) <= 3
    assert taken == [120, 40]
    again = TokenData({str(tokens): 3, str(other): 1}, 32).loader(4, 2, seed=1, threads=0)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(rows_of(islice(again, 4))[0], rows_of(islice(loader, 2))[0])
    with pytest.raises(ConfigError, match="A mixture has no epochs"):
        mixed.loader(4, 4, epochs=1)


def test_a_mixture_reads_every_row_of_each_member_in_order() -> None:
    mixture = Mixture([0.7, 0.2, 0.1])
    members, rows = mixture.locate(np.arange(2 * BLOCK))
    for member, share in enumerate((0.7, 0.2, 0.1)):
        mine = rows[members == member]
        assert (mine == np.arange(len(mine))).all() and abs(len(mine) / (2 * BLOCK) - share) < 2 / BLOCK
    counts = np.cumsum(members[:, None] == np.arange(3), axis=0)
    shares = np.arange(1, 2 * BLOCK + 1)[:, None] * mixture.counts / BLOCK
    assert np.abs(counts - shares).max() < 1.5  # evenly spread
    for weights in ([1, 0], [1, -1], [1, float("nan")], [1e9, 1]):
        with pytest.raises(ConfigError, match="The weights are"):
            Mixture(weights)


def test_best_fit_equals_the_textbook_algorithm() -> None:
    """The rows are those of the textbook's loop, one piece after another."""
    drawn = np.random.default_rng(0)
    for room, count in ((1, 5), (10, 100), (64, 500), (2048, 300)):
        lengths = drawn.integers(1, room + 1, count)
        bounds, pieces = best_fit(lengths, drawn.permutation(count), room)
        assert sorted(pieces.tolist()) == list(range(count)) and bounds[0] == 0 and bounds[-1] == count
        used = np.add.reduceat(lengths[pieces], bounds[:-1])
        assert (np.diff(bounds) > 0).all() and (used <= room).all()
        left: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fits = [(each, at) for at, each in enumerate(left) if each >= length]
            if fits:
                left[min(fits)[1]] -= length
            else:
                left.append(room - length)
        assert sorted(room - used) == sorted(left)


def test_wrong_arguments_of_token_data_are_named(tokens: Path, tmp_path: Path) -> None:
    small = folder(tmp_path, 1)
    data = TokenData(tokens, 8)
    cases: list[tuple[Any, str]] = [
        (lambda: TokenData(tokens, 0), "length is 0"),
        (lambda: TokenData([], 8), "Give at least 1 token and 1 folder"),
        (lambda: TokenData(tokens, 8, part="test"), r"part is 'test'"),
        (lambda: TokenData(tokens, 8, part="held_out"), "held_out is 0.0 .* must be above 0"),
        (lambda: TokenData(tokens, 8, packing="hole"), "packing is 'hole': did you mean 'whole'"),
        (lambda: TokenData(small, 8, held_out=0.1), r"has one document.*--split line"),
        (lambda: TokenData(tokens, 8, vocab_size=100), r"tokens up to 122, .* 100 entries. .*tokens.jsonl, line 1"),
        (lambda: TokenData(tmp_path, 8), r"has no tokens: it has no index.json. Give a folder that triax data"),
        (lambda: TokenData(tmp_path / "none", 8), r"has no tokens: it does not exist"),
        (lambda: TokenData(tmp_path / "tokens.jsonl", 8), r"is a file, but tokens are a folder"),
        (lambda: data.loader(8, 4, threads=1000), r"threads is 1000, but a loader has 0 to 256"),
        (lambda: data.loader(6, 4), r"A global batch of 6 rows is not a multiple of 1 replicas .* multiple of 4"),
        (lambda: data.loader(8, 4, replica=2, replicas=2), "there are replicas 0 to 1"),
        (lambda: data.loader(8, 4).load_state_dict({"row": -1}), "The row of the position is -1"),
        (lambda: TokenData(small, 8).loader(8, 4).load_state_dict(data.loader(8, 4).state_dict()), "data with folders"),
        (lambda: data.loader(8, 4, seed=1).load_state_dict(data.loader(8, 4).state_dict()), "seed 0, but here it is 1"),
        (
            lambda: TokenData(tokens, 9).loader(8, 4).load_state_dict(data.loader(8, 4).state_dict()),
            "length 8, but here it is 9",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ConfigError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_a_token_above_the_largest_of_the_index_is_named(tmp_path: Path) -> None:
    """A damaged byte is named with its document and the line of its source; the loader stays where it is."""
    path = folder(tmp_path, 30)  # a token is a byte, and document 20 is "20:" with letters up to "z", which is 122
    (damaged,) = (file.path for file in TokenFolder(path).files if b"20:" in file.path.read_bytes())
    damaged.write_bytes(damaged.read_bytes().replace(b"20:", b"\xc80:"))
    loader = TokenData(path, 16).loader(2, 2, threads=1)
    with pytest.raises(CorruptError, match=r"document 20 \(.*tokens.jsonl, line 21\) has the token 200, but .* 122"):
        rows_of(islice(loader, loader.rows.count))
    position = loader.state_dict()
    with pytest.raises(CorruptError, match="document 20 "):
        next(loader)
    assert loader.state_dict() == position
    (problem,) = TokenFolder(path).verify()
    assert " is damaged" in problem


# ------------------------------------------------------------------------------------------- in an engine, on a grid


def part(tokens: str, sizes: tuple[int, int, int], saved: str, resume: bool, steps: int) -> Any:
    """Train a GPT with the engine's own loader, from the checkpoint of another grid, and save a checkpoint."""
    grid = Grid(*sizes, timeout=60)
    config = GPTConfig(
        vocab_size=256, max_position_embeddings=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = PipelineModule(
        gpt_layers(config), grid=grid, loss_fn=NextTokenLoss(grid, vocab_size=256), dtype=torch.float64
    )
    settings: dict[str, Any] = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "seed": 3}
    settings |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    data: Any = TokenData(tokens, 32, vocab_size=256, held_out=0.1)
    engine = triax.initialize(model=model, config=settings, training_data=data)[0]
    assert isinstance(engine.training_dataloader, TokenLoader)
    if resume:
        engine.load_checkpoint(saved)
    losses = [engine.train_batch().item() for _ in range(steps)]
    engine.save_checkpoint(saved)
    return losses, engine.training_dataloader.state_dict()


def test_a_run_resumes_its_data_on_another_grid(ranks: Any, tokens: Path, tmp_path: Path) -> None:
    """The place is in the checkpoint, so the losses are those of a run that was never stopped."""
    [(whole, end)] = ranks(1, part, str(tokens), (1, 1, 1), str(tmp_path / "whole"), resume=False, steps=4)
    losses: list[float] = []
    for sizes in [(2, 2, 1), (1, 1, 2)]:
        count = sizes[0] * sizes[1] * sizes[2]
        results = ranks(count, part, str(tokens), sizes, str(tmp_path / "parts"), bool(losses), 2)
        assert all(found == results[0] for found in results)
        losses += results[0][0]
    assert losses == pytest.approx(whole, rel=1e-10, abs=0)
    assert results[0][1] == end and end["row"] == 16
