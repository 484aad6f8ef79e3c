"""Documents of a step dealt out by their work: the same tokens, loss and gradients, on shares of equal cost."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triax
from triax import Grid, NextTokenLoss, PipelineModule, llama_layers
from triax.base.errors import AgreedError, ConfigError
from triax.data import TokenData
from triax.data.balance import MOST, Balance, deal
from triax.engine.setup.balance import balance_of
from triax.models import MixtralConfig, mixtral_layers

from support.tokenized import byte_llama, folder
from support.toys import error_text

ROWS, LENGTH = 8, 48
CONFIG = byte_llama(LENGTH)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: Any) -> Path:
    return folder(tmp_path_factory.mktemp("tokens"), 300)


# ------------------------------------------------------------------------------------------------ who gets what


def lognormal_step(sigma: float, rows: int, length: int, seed: int) -> list[list[int]]:
    """Tokens of the documents of each row: lengths with the median 2,000, cut into rows as TokenData cuts them."""
    draw, room = np.random.default_rng(seed), length
    cut: list[list[int]] = [[]]
    while True:
        left = int(draw.lognormal(math.log(2000), sigma)) + 1
        while left:
            cut[-1].append(min(left, room))
            left, room = left - cut[-1][-1], room - cut[-1][-1]
            if not room:
                if len(cut) == rows:
                    return cut
                cut, room = [*cut, []], length


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.0])
def test_replicas_have_equal_work_up_to_two_percent(sigma: float) -> None:
    """8 replicas x 4 microbatches of 131,072 tokens at the costs of a model of 8B parameters, over 10 steps.

    A microbatch cannot have less work than its longest document.
    """
    replicas, microbatches, length, scale = 8, 4, 131_072, 61_000.0
    found = []
    for seed in range(10):
        rows = lognormal_step(sigma, replicas * microbatches, length, seed)
        sizes = np.array([size for row in rows for size in row])
        costs = sizes + sizes**2 / scale
        dealt = deal(sizes, scale, replicas, microbatches)
        assert sorted(np.concatenate(dealt).tolist()) == list(range(len(sizes)))
        work = np.array([costs[chosen].sum() for chosen in dealt]).reshape(replicas, microbatches)
        held = np.array([sizes[chosen].sum() for chosen in dealt])
        assert held.max() <= MOST * length or held.max() == sizes.max()
        assert work.max() <= max(costs.max(), 1.02 * work.mean()) * (1 + 1e-12) or held.max() > 1.2 * length
        found.append(work.sum(1).max() / work.sum(1).mean())
    assert np.median(found) <= 1.001 and np.mean(found) <= 1.02


def test_a_share_that_is_full_takes_no_document() -> None:
    """Nine short documents cost less than one long one, but no replica may hold more than 1.25 times the mean."""
    sizes = np.array([100, *[20] * 9])
    wanted = MOST * sizes.sum() / 2
    held = [int(sizes[chosen].sum()) for chosen in deal(sizes, 1.0, 2, 1)]
    assert sum(held) == sizes.sum() and max(held) <= wanted
    assert [len(chosen) for chosen in deal(np.array([5, 5]), 1.0, 4, 1)] == [1, 1, 0, 0]


# ------------------------------------------------------------------------------------------------ rows of a loader


def documents_of(batches: list[Any]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Count the documents of microbatches with their labels, without padding."""
    found: Counter[Any] = Counter()
    for (ids, documents), labels in batches:
        for row, numbers, follow in zip(ids, documents, labels, strict=True):
            for number in numbers.unique():
                own = numbers == number
                found[tuple(row[own].tolist()), tuple(follow[own].tolist())] += 1
    return Counter({key: count for key, count in found.items() if any(label != -100 for label in key[1])})


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("replicas", "micro", "multiple"), [(1, 1, 1), (2, 2, 4), (4, 2, 1)])
def test_a_balanced_step_has_the_documents_of_its_rows(
    tokens: Path, tmp_path: Path, mixed: bool, replicas: int, micro: int, multiple: int
) -> None:
    folders: Any = {str(tokens): 0.75, str(folder(tmp_path, 40)): 0.25} if mixed else tokens
    data, per = TokenData(folders, LENGTH), ROWS // (replicas * micro)
    rows = data.loader(ROWS, ROWS, seed=3)
    parts = [
        data.loader(ROWS, micro, replica, replicas, seed=3, threads=replica % 2, balance=Balance(100.0, multiple))
        for replica in range(replicas)
    ]
    for _ in range(5):
        batches = [batch for part in parts for batch in islice(part, per)]
        assert documents_of(batches) == documents_of([next(rows)])
        assert all(ids.shape[0] == 1 and ids.shape[1] % multiple == 0 for (ids, _), _ in batches)


def test_a_balanced_epoch_ends_as_its_rows_do(tokens: Path) -> None:
    """The last step of an epoch has fewer rows than others, here too few for each microbatch to have a document."""
    data = TokenData(tokens, LENGTH)
    train = data.rows(0).count - 1  # so that the second and last step has one row
    whole = documents_of([*data.loader(train, 1, epochs=1)])
    found = [*data.loader(train, 1, epochs=1, balance=Balance(100.0))]
    assert documents_of(found) == whole and len(found) == 2 * train


def test_a_balanced_loader_resumes_on_another_number_of_replicas(tokens: Path) -> None:
    data, balance = TokenData(tokens, LENGTH), Balance(100.0)
    before = data.loader(ROWS, 2, 1, 2, seed=1, balance=balance)
    assert len([*islice(before, 6)]) == 6  # three steps of two microbatches
    wanted = documents_of([*islice(before, 2), *islice(_at(data, 0, 2, before), 2)])
    after = [_at(data, replica, 4, before, step=3) for replica in range(4)]
    assert documents_of([next(part) for part in after]) == wanted


def _at(data: TokenData, replica: int, replicas: int, before: Any, step: int = 3) -> Any:
    made = data.loader(ROWS, 2, replica, replicas, seed=1, balance=Balance(100.0))
    made.load_state_dict({**before.state_dict(), "row": step * ROWS})
    return made


# ------------------------------------------------------------------------------------------------ training


def trained(tokens: str, sizes: dict[str, Any], balance: bool, **options: Any) -> Any:
    """Losses and whole gradients of two steps."""
    grid = Grid(**sizes)
    layers = llama_layers(CONFIG, sequence_parallel=grid.tensor.size > 1)
    loss = NextTokenLoss(grid, CONFIG.vocab_size)
    chunks = 2 if options.get("schedule") == "zb-v" else 1
    module = PipelineModule(layers, grid=grid, loss_fn=loss, dtype=torch.float64, seed=2, chunks=chunks)
    batch = triax.Batch(size=ROWS, microbatch=1 if grid.replicas > 2 else 2, balance=balance)
    engine = triax.Engine(
        module,
        training_data=TokenData(tokens, LENGTH),
        optimizer=triax.Optimizer("SGD", lr=0.1),
        batch=batch,
        **options,
    )
    found = []
    for _ in range(2):
        loss = engine.train_batch().item()
        found.append((loss, engine.gather("gradients")))
    return found


GRIDS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"data": 2}, {"zero": 3}),
    ({"pipe": 2, "data": 2}, {"schedule": "zb-v", "zero": 2}),
    ({"pipe": 2, "tensor": 2}, {"schedule": "1f1b"}),
    ({"context": 2, "data": 2}, {"zero": 1}),
]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [each if "data" in each[0] else pytest.param(*each, marks=pytest.mark.exhaustive) for each in GRIDS],
)
def test_balanced_training_equals_the_rows_of_one_process(
    ranks: Any, tokens: Path, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    """Losses and gradients, in float64 to 1e-10: one process reads the rows in their order."""
    (wanted,) = ranks(1, trained, str(tokens), {}, False)
    for found in ranks(math.prod(sizes.values()), trained, str(tokens), sizes, True, **options):
        for (loss, gradients), (plain, whole) in zip(found, wanted, strict=True):
            assert abs(loss - plain) < 1e-10
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, whole[name], rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------------------------ cost and refusals


def test_the_cost_of_a_document_comes_from_the_models_matrices() -> None:
    """Of a Llama's block: 4 D^2 of attention, 3 D W of the MLP; channels: D a block. Of the ends: 2 V D."""
    module = PipelineModule(llama_layers(CONFIG), loss_fn=NextTokenLoss(Grid(), CONFIG.vocab_size))
    width, inner, blocks = 16, 24, 4
    weights = blocks * (4 * width**2 + 3 * width * inner) + 2 * 256 * width
    assert balance_of(module, Grid()) == Balance(weights / (blocks * width), 1)


def test_balance_is_refused_where_it_cannot_be_right(tokens: Path) -> None:
    module = PipelineModule(llama_layers(CONFIG), loss_fn=NextTokenLoss(Grid(), CONFIG.vocab_size))
    options: dict[str, Any] = {"optimizer": triax.Optimizer("SGD", lr=0.1), "batch": triax.Batch(size=8, balance=True)}
    plain = torch.nn.Linear(2, 2)
    assert "only a PipelineModule with" in error_text(lambda: triax.Engine(plain, **options))
    own = iter([((torch.zeros(1, 8, dtype=torch.long),) * 2, torch.zeros(1, 8, dtype=torch.long))] * 8)
    engine = triax.Engine(module, **options)
    with pytest.raises(AgreedError, match=r"or iterate over engine\.make_loader"):
        engine.train_batch(own)
    assert engine.train_batch(iter(engine.make_loader(TokenData(tokens, LENGTH)))) > 0
    other = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    assert "documents of triax.data.TokenData" in error_text(
        lambda: triax.Engine(module, training_data=other, **options)
    )
    with pytest.raises(ConfigError, match="document_mask is false"):
        TokenData(tokens, LENGTH, document_mask=False).loader(8, 2, balance=Balance(1.0))
    experts = MixtralConfig.preset("mixtral-tiny")
    mixture = PipelineModule(mixtral_layers(experts), loss_fn=NextTokenLoss(Grid(), experts.vocab_size))
    assert "balance=None, no z_loss and no capacity" in error_text(lambda: triax.Engine(mixture, **options))
