"""Scores of given texts on any grid: the log-probability of each token, and whether it is the likeliest one.

The tokens run through the model of a training engine as a batch of an evaluation does, with the output layer in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import check_count
from ..context.order import gather
from ..engine.pipeline_engine import PipelineEngine
from ..grid.agreement.agreement import largest
from ..grid.comm.equal_facts import same
from ..grid.loss_terms import Loss
from ..models.layers import softcapped
from ..models.log_probs import LogProbsLoss, label_log_probs
from ..pipe.module import PipelineModule
from .engine import agreed_sizes
from .sampling import Sampling, choose

_IGNORED = -100


class Score(NamedTuple):
    """Score of the last tokens of a sequence, given the tokens before each.

    Attributes:
        log_probs: the log-probability of each token.
        is_likeliest: True for each token that is the first of the likeliest ones, which greedy decoding would take.
    """

    log_probs: list[float]
    is_likeliest: list[bool]


class Scorer:
    """Scorer of texts by the model of an engine, as the model is at each call. Collective.

    Args:
        engine: the engine, with or without an optimizer. Its loss function is not used.
        batch: sequences of a microbatch; None: the engine's number.

    Attributes:
        max_length: number of the model's positions: the most tokens that the model reads at once.

    Raises:
        ValueError: the number of positions or the size of the vocabulary is unknown.
    """

    def __init__(self, engine: PipelineEngine, batch: int | None = None) -> None:
        module = engine.module
        _, positions, vocab_size = agreed_sizes(module)
        if not (positions and vocab_size):
            what = (
                "layer has the attribute max_position_embeddings" if vocab_size else "output layer has a weight (V, D)"
            )
            raise ValueError(f"texts cannot be scored, because no {what}. Use the layers of triax.models.")
        check_count("Scorer", batch=batch or engine.batch.micro)
        self._engine, self._batch, self._vocab_size = engine, batch or engine.batch.micro, vocab_size
        grid = engine.grid
        sharded = any(getattr(layer, "sequence_parallel", False) for layer in module.modules())
        shards = grid.tensor.size if largest(grid, [float(sharded)])[0] else 1
        self._unit = shards * (2 * grid.context.size if grid.context.size > 1 else 1)
        self.max_length = positions // self._unit * self._unit

    def __call__(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Score]:
        """Score the last tokens of each sequence. Collective: every rank passes the same, and gets all scores.

        A step of the model reads a batch of sequences of similar lengths, padded on the right.

        Args:
            sequences: ids; the model reads all but the last one, ``max_length`` at most.
            counts: number of the last tokens of each sequence to score, less than its length.

        Raises:
            ValueError: on every rank: a sequence does not fit, or ranks got different sequences.
        """
        grid, axis = self._engine.grid, self._engine.grid.data
        for ids, count in zip(sequences, counts, strict=True):
            if not (0 < count < len(ids) <= self.max_length + 1 and 0 <= min(ids) <= max(ids) < self._vocab_size):
                raise ValueError(
                    f"a sequence has {len(ids)} ids from {min(ids, default=0)} to {max(ids, default=0)}, of which "
                    f"{count} are scored: give 2 to {self.max_length + 1} ids below {self._vocab_size}, and score at "
                    "least 1 and not the first"
                )
        if not same(grid.world, (sequences, counts), grid.device):
            raise ValueError("the ranks got different sequences to score: pass the same on every rank")
        order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
        groups = [order[first : first + self._batch] for first in range(0, len(order), self._batch)]
        scores: dict[int, Score] = {}
        most = 4 * grid.pipe.size  # microbatches of a call, whose labels and scores are held
        for first in range(0, len(groups), most * axis.size):
            batch = groups[first : first + most * axis.size]
            batch += batch[:1] * (-len(batch) % axis.size)  # replicas run equally many
            for indices, values in zip(batch, self._values(batch, sequences, counts), strict=True):
                for index, row in zip(indices, values, strict=True):
                    last = row[: len(sequences[index]) - 1][-counts[index] :].tolist()
                    scores[index] = Score([-abs(value) for value in last], [value <= 0 for value in last])
        return [scores[index] for index in range(len(sequences))]

    def _values(
        self, groups: list[list[int]], sequences: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[Tensor]:
        """Return the signed log-probabilities of each group's tokens, float64 (B, T) on the CPU, on every rank."""
        engine, grid = self._engine, self._engine.grid
        pairs = [self._microbatch([sequences[i] for i in group], [counts[i] for i in group]) for group in groups]
        shard = pairs[grid.data.rank :: grid.data.size]
        with _scoring(engine.module, self._vocab_size) as records:
            engine.eval_batch(iter(shard), num_micro_batches=len(shard))
        last = engine.module.placement[-1]
        size = max(sum(labels.numel() for _, labels in pairs[rank :: grid.data.size]) for rank in range(grid.data.size))
        own = torch.zeros(size, dtype=torch.float64, device=grid.device)
        if grid.pipe.rank == last:
            gathered = [gather(record, grid.context, x.shape[1]) for record, (x, _) in zip(records, shard, strict=True)]
            flat = torch.cat([record.double().flatten() for record in gathered])
            own[: len(flat)] = flat
        grid.pipe.broadcast(own, last)
        every = own.new_empty(grid.data.size, size)
        grid.data.all_gather(every, own)
        rows, values = every.cpu(), list[Tensor]()
        at = [0] * grid.data.size
        for index, (x, _) in enumerate(pairs):
            rank = index % grid.data.size
            values.append(rows[rank, at[rank] : at[rank] + x.numel()].view(x.shape))
            at[rank] += x.numel()
        return values

    def _microbatch(self, sequences: list[Sequence[int]], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, (B, T) each, padded to the longest sequence."""
        length = -(-max(len(ids) - 1 for ids in sequences) // self._unit) * self._unit
        x = torch.zeros(len(sequences), length, dtype=torch.long)
        labels = torch.full((len(sequences), length), _IGNORED)
        for row, (ids, count) in enumerate(zip(sequences, counts, strict=True)):
            tokens = torch.tensor(ids)
            x[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, len(tokens) - 1 - count : len(tokens) - 1] = tokens[len(tokens) - count :]
        return x, labels


@dataclass(frozen=True)
class _SignedScores(LogProbsLoss):
    """Loss function that gets log p of each label that is the likeliest token, and -log p of each other label.

    The sign tells them apart: log p of a token that is not the likeliest is at most -log 2, and not 0.
    """

    def token_values(self, logits: Tensor, labels: Tensor, softcap: float | None = None) -> Tensor:
        exact = softcapped(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
        rows = exact.flatten(0, 1)
        best = choose(rows, Sampling(temperature=0), (), axis=self.grid.tensor, vocab_size=self.vocab_size)
        log_probs = label_log_probs(exact, labels, self.grid, self.vocab_size)
        return torch.where(best.view(labels.shape).to(labels.device) == labels, log_probs, -log_probs)


@contextmanager
def _scoring(module: PipelineModule, vocab_size: int) -> Iterator[list[Tensor]]:
    """Context in which evaluations append the signed log-probabilities of each microbatch, (B, T), to a list."""
    records: list[Tensor] = []

    def keep(values: Tensor, labels: Any) -> Loss:
        records.append(values.detach())
        return Loss({"scores": (values.new_zeros(()), (labels != _IGNORED).sum())})

    with module.other_loss(_SignedScores(module.grid, vocab_size, keep)):
        yield records
