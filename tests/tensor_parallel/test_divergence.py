"""Divergences over a sharded vocabulary, and their gradients, beside plain PyTorch over the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triax import Grid
from triax.grid.ranges import split
from triax.tensor_parallel.divergence import top_divergence, top_log_probs, vocab_parallel_divergence

WORDS, ROWS, K = 11, 5, 4


def logits(seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(ROWS, WORDS, generator=generator, dtype=torch.float64)


def plain(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergences of probabilities (N, V) by their definition."""
    kl = lambda p, q: (p * (p / q).log()).sum(-1)  # noqa: E731
    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    m = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, m) + (1 - beta) * kl(student, m)


def bucketed(probabilities: Tensor, ids: Tensor) -> Tensor:
    """The probabilities of k words and of all others, (N, k + 1)."""
    known = probabilities.gather(-1, ids)
    others = probabilities.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([known, others], -1)


def sharded(beta: float, temperature: float, k: int | None, scale: float) -> tuple[Any, ...]:
    """Divergences, entropies and the gradient of their weighted sum, whose shards are joined."""
    grid = Grid(tensor=3)
    axis, mine = grid.tensor, slice(*split(WORDS, 3, grid.tensor.rank))
    student, teacher = logits(0, scale)[:, mine].clone().requires_grad_(), logits(1)[:, mine].clone()
    values, ids = top_log_probs(teacher, k or K, axis, WORDS, temperature)
    if k is None:
        found, entropies = vocab_parallel_divergence(student, teacher, axis, beta, temperature)
    else:
        found, entropies = top_divergence(student, values, ids, axis, WORDS, beta, temperature)
    (found * torch.arange(1, ROWS + 1)).sum().backward()
    assert student.grad is not None
    return found.detach(), entropies, values, ids, student.grad


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 2.0), (1.0, 0.7)])
@pytest.mark.parametrize("k", [None, K])
@pytest.mark.parametrize("scale", [2.0, 30.0])
def test_sharded_divergences_equal_those_of_whole_logits(
    ranks: Any, beta: float, temperature: float, k: int | None, scale: float
) -> None:
    student = logits(0, scale).requires_grad_()
    s, t = ((z / temperature).softmax(-1) for z in (student, logits(1)))
    ids = t.topk(k or K, -1).indices
    wanted = plain(s, t, beta) if k is None else plain(bucketed(s, ids), bucketed(t, ids), beta)
    (wanted * torch.arange(1, ROWS + 1)).sum().backward()
    everyone = ranks(3, sharded, beta, temperature, k, scale)
    entropies = torch.special.entr(s).sum(-1)
    for found, entropy, values, words, _ in everyone:
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(entropy, entropies.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(values, t.gather(-1, ids).log(), rtol=0, atol=1e-10)
        assert torch.equal(words, ids.int())
    gradient = torch.cat([each[-1] for each in everyone], -1)
    assert student.grad is not None
    torch.testing.assert_close(gradient, student.grad, rtol=1e-10, atol=1e-10)


def test_the_remaining_probability_of_a_sure_student_is_exact() -> None:
    """1 less the known probabilities would be 0 here, and the loss infinite."""
    student = torch.tensor([[90.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    values, ids = torch.tensor([[0.5]], dtype=torch.float64).log(), torch.tensor([[0]])
    (found,), _ = top_divergence(student, values, ids, Grid().tensor, 3, beta=0.0)
    rest = torch.tensor([0.0, 1.0], dtype=torch.float64).logsumexp(0) - 90  # log of its probability
    assert found.item() == pytest.approx((-0.5 * rest).item() - torch.tensor(2.0).double().log().item(), rel=1e-12)
    found.backward()
    assert student.grad is not None
    others = 0.5 * torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(student.grad[0], torch.cat([torch.tensor([0.5]).double(), -others]), rtol=0, atol=1e-12)


def test_top_divergence_refuses_token_ids_outside_the_vocabulary() -> None:
    values, ids = torch.full((1, 2), -2.0), torch.tensor([[0, 3]])
    with pytest.raises(IndexError, match="a teacher's token id lies outside the vocabulary of 3"):
        top_divergence(torch.zeros(1, 3), values, ids, Grid().tensor, 3, beta=0.0)
