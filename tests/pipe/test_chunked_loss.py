"""Output layer and loss in chunks of tokens, beside the same with whole logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import triax
from triax import Grid, LayerSpec, Loss, NextTokenLoss, PipelineModule
from triax.engine.monitor.profiler.flop_counter import FlopCounter
from triax.engine.monitor.profiler.memory_meter import MemoryMeter
from triax.grid.comm.spans import OpenSpan
from triax.pipe.chunked_loss import LastLayer, loss_in_chunks
from triax.testing.pool import RankFailure

from support.training import microbatches, pipeline_engine, text_batches, tiny_gpt

VOCABULARY, SAMPLES, LENGTH, CHUNK = 37, 4, 8, 3
Found = tuple[float, float, dict[str, Tensor]]


def close(found: Tensor, wanted: Tensor) -> bool:
    """Return True if no element differs by more than 1e-12 of the largest."""
    return bool((found - wanted).abs().max() <= 1e-12 * wanted.abs().max())


def weighted(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels, some of them ignored, and a weight for each."""
    return torch.where(labels % 5 == 0, -100, labels), 0.5 + (labels % 3).double()


def step(grid: Grid, loss_fn: Any, schedule: str, stage: Any, features: dict[str, Any], size: int) -> Found:
    """Return loss of an evaluation and of a step, and the gradients."""
    features = dict(features)
    pairs, recompute = features.pop("pairs", False), features.pop("recompute", 0)
    module = tiny_gpt(grid, loss_fn=loss_fn, activation_checkpoint_interval=recompute, **features)
    engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=size), stage, schedule=schedule)
    batches = [
        (ids, *(weighted(labels) if pairs else (labels,)))
        for ids, labels in text_batches(VOCABULARY, SAMPLES, LENGTH, 1)
    ]

    def data() -> Any:
        for ids, *labels in microbatches(grid, batches, size):
            yield ids, tuple(labels) if pairs else labels[0]

    evaluated = engine.eval_batch(data()).item()
    loss = engine.train_batch(data()).item()
    return evaluated, loss, engine.gather("gradients")


def whole_and_chunked_steps(
    axes: dict[str, Any], schedule: str, stage: Any, features: dict[str, Any], size: int
) -> list[Found]:
    """Return the same step with whole logits and in chunks."""
    grid = Grid(**axes, timeout=60)
    features = {"loss": {}, **features}
    options = features.pop("loss")
    losses = [NextTokenLoss(grid, VOCABULARY, **options, chunk_tokens=tokens) for tokens in (None, CHUNK)]
    return [step(grid, loss_fn, schedule, stage, features, size) for loss_fn in losses]


CASES: list[tuple[dict[str, int], str, int, dict[str, Any], int]] = [
    ({}, "1f1b", 0, {"loss": {"label_smoothing": 0.1, "z_loss": 0.01}}, 2),
    ({}, "1f1b", 0, {"tie_word_embeddings": False, "pairs": True}, 1),
    ({"pipe": 2}, "zb-h1", 2, {"tie_word_embeddings": False, "final_logit_softcapping": 2.0}, 2),
    ({"pipe": 2}, "zb-v", 2, {"final_logit_softcapping": 2.0, "recompute": 1}, 2),
    ({"data": 2}, "1f1b", 3, {"recompute": 2}, 2),
    ({"tensor": 2}, "1f1b", 2, {"sequence_parallel": True, "loss": {"z_loss": 0.01}, "pairs": True}, 2),
    ({"tensor": 2, "context": 2}, "1f1b", 1, {"pairs": True, "loss": {"label_smoothing": 0.1}}, 2),
]
MORE: list[tuple[dict[str, int], str, int, dict[str, Any], int]] = [
    ({"pipe": 2}, "gpipe", 1, {"loss": {"z_loss": 0.01}, "pairs": True}, 2),
    ({"pipe": 2, "data": 2}, "zb-h1", 3, {"recompute": 1, "loss": {"label_smoothing": 0.1}}, 1),
    ({"pipe": 2, "tensor": 2}, "zb-h1", 1, {"sequence_parallel": True, "tie_word_embeddings": False}, 2),
    ({"data": 2, "context": 2}, "1f1b", 3, {}, 2),
    ({"pipe": 2, "context": 2}, "interleaved", 1, {}, 2),
]


@pytest.mark.parametrize(
    ("axes", "schedule", "stage", "features", "size"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)],
)
def test_chunked_losses_have_the_gradients_of_whole_logits(
    ranks: Any, axes: dict[str, int], schedule: str, stage: int, features: dict[str, Any], size: int
) -> None:
    for whole, chunked in ranks(
        math.prod(axes.values()), whole_and_chunked_steps, axes, schedule, stage, features, size
    ):
        assert chunked[:2] == pytest.approx(whole[:2], rel=1e-13)
        assert whole[2].keys() == chunked[2].keys()
        for name, gradient in whole[2].items():
            assert close(chunked[2][name], gradient), name


def test_next_token_loss_options_equal_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, VOCABULARY, dtype=torch.float64, generator=generator).requires_grad_()
    labels, weights = weighted(torch.randint(VOCABULARY, (2, 5), generator=generator))
    loss = NextTokenLoss(Grid(), VOCABULARY, label_smoothing=0.2, z_loss=0.3)
    total, weight = loss(logits, (labels, weights), softcap=1.5)

    capped = 1.5 * torch.tanh(logits / 1.5)
    losses = F.cross_entropy(capped.mT, labels, label_smoothing=0.2, reduction="none")
    losses = losses + 0.3 * capped.logsumexp(-1).square() * (labels != -100)
    wanted = (losses * weights).sum()
    assert close(total, wanted) and weight == (weights * (labels != -100)).sum() == loss.weight((labels, weights))
    assert close(*(torch.autograd.grad(each, logits)[0] for each in (total, wanted)))


class Scores:
    """Two terms of own functions of the logits, one of them without a label in most chunks, and two metrics."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Loss:
        mine, rare = logits.gather(-1, labels[..., None])[..., 0], labels == 5
        right = (logits.argmax(-1) == labels).sum()
        return Loss(
            {"margin": (F.softplus(-mine).sum(), labels.numel()), "rare": (mine[rare].square().sum(), rare.sum())},
            {"rare": 0.25},
            {
                "right": (right, labels.numel()),
                "counts": (torch.bincount(labels.flatten() % 3, minlength=3), labels.numel()),
            },
        )

    def weight(self, labels: Tensor) -> dict[str, float]:
        return {"margin": labels.numel(), "rare": float((labels == 5).sum())}


class ScaledLinear(nn.Linear):
    """A head with a factor for each output, whose gradient autograd gives for each chunk."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def own_losses(axes: dict[str, Any], schedule: str) -> list[tuple[Found, Any]]:
    grid, found = Grid(**axes, timeout=60), []
    for loss_fn in (Scores(), triax.chunked(Scores(), tokens=CHUNK)):
        layers: list[Any] = [
            LayerSpec(nn.Embedding, VOCABULARY, 12),
            LayerSpec(nn.Linear, 12, 12),
            torch.tanh,
            LayerSpec(ScaledLinear, 12, VOCABULARY),
        ]
        module = PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, seed=3)
        engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=2), schedule=schedule)
        data = text_batches(VOCABULARY, SAMPLES, LENGTH, 1)
        loss = engine.train_batch(microbatches(grid, data, 2)).item()
        metrics = engine.metrics
        evaluated = engine.eval_batch(microbatches(grid, data, 2)).item()
        found.append(((evaluated, loss, engine.gather("gradients")), metrics))
    return found


@pytest.mark.parametrize(
    ("axes", "schedule"), [({}, "1f1b"), ({"pipe": 2}, "zb-h1"), ({"pipe": 2, "data": 2}, "gpipe")]
)
def test_user_terms_and_metrics_in_chunks_equal_whole_ones(ranks: Any, axes: dict[str, int], schedule: str) -> None:
    for (whole, metrics), (chunked, own) in ranks(math.prod(axes.values()), own_losses, axes, schedule):
        assert chunked[:2] == pytest.approx(whole[:2], rel=1e-13)
        assert list(own) == ["margin", "rare", "right", "counts"] == list(metrics)
        for name, value in metrics.items():
            assert own[name] == pytest.approx(value, rel=1e-13), name
        for name, gradient in whole[2].items():
            assert close(chunked[2][name], gradient), name


def test_a_chunked_loss_holds_the_bytes_of_two_chunks() -> None:
    tokens, width, vocabulary, chunk = 4096, 8, 1000, 128
    grid, head = Grid(), nn.Linear(width, vocabulary, bias=False, dtype=torch.float64)
    x = torch.randn(2, tokens // 2, width, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(vocabulary, (2, tokens // 2))
    peaks = {}
    for each in (chunk, 2 * chunk, tokens):
        loss = NextTokenLoss(grid, vocabulary, chunk_tokens=each)
        with MemoryMeter(lambda: 0) as meter:
            total, _ = loss.of_head(LastLayer(head, head), x, labels)
            total.backward()
        peaks[each] = meter.peak
        x.grad = head.weight.grad = None
    whole = 8 * tokens * vocabulary
    gradients = 8 * (tokens * width + width * vocabulary)
    # One block of the loss in its own precision, a few numbers per token of a chunk, and the loss.
    block = 8 * 2**18 + 8 * vocabulary
    for each in (chunk, 2 * chunk):
        logits = 8 * each * vocabulary
        assert logits < peaks[each] - gradients <= 2 * logits + block + 100 * each, each
    assert peaks[tokens] > 2 * whole


class Products(TorchDispatchMode):
    """Counter of the multiplications of matrix products with a dim of the vocabulary's size."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            if VOCABULARY in (*a.shape, *b.shape):
                self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_chunked_losses_recompute_no_product_of_the_head(schedule: str) -> None:
    counts = []
    for tokens in (None, 5):
        grid = Grid()
        module = tiny_gpt(grid, loss_fn=NextTokenLoss(grid, VOCABULARY, chunk_tokens=tokens))
        engine = pipeline_engine(module, triax.Batch(size=SAMPLES, microbatch=2), schedule=schedule)
        with Products() as products:
            engine.train_batch(microbatches(grid, text_batches(VOCABULARY, SAMPLES, LENGTH, 1), 2))
        counts.append(products.count)
    one = 16 * VOCABULARY  # of a token; each microbatch is looked at with one token, to see what its loss returns
    assert counts == [3 * SAMPLES * LENGTH * one, (3 * SAMPLES * LENGTH + 2) * one]


def test_heads_that_mix_tokens_or_have_hooks_are_not_run_in_chunks() -> None:
    grid = Grid()
    loss = NextTokenLoss(grid, VOCABULARY, chunk_tokens=2)

    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(1, keepdim=True))

    assert loss.takes_head(nn.Linear(4, VOCABULARY), None)
    assert not loss.takes_head(Mixing(4, VOCABULARY), None)
    assert not loss.takes_head(nn.Linear(4, VOCABULARY), lambda layer, x: layer(x - x.mean(1, keepdim=True)))

    class Halved(NextTokenLoss):
        def __call__(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
            total, weight = super().__call__(*arguments, **named)
            return total / 2, weight

    assert not Halved(grid, VOCABULARY, chunk_tokens=2).takes_head(nn.Linear(4, VOCABULARY), None)
    watched = nn.Linear(4, VOCABULARY)
    watched.register_forward_hook(lambda *_: None)
    assert not loss.takes_head(watched, None)


def train_with_a_mean() -> None:
    grid = Grid(pipe=2, timeout=30)
    mean = triax.chunked(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()), tokens=4)
    engine = pipeline_engine(tiny_gpt(grid, loss_fn=mean), triax.Batch(size=2, microbatch=1))
    engine.train_batch(microbatches(grid, text_batches(VOCABULARY, 2, LENGTH, 1)))


def test_chunked_losses_that_are_means_are_refused(ranks: Any) -> None:
    """The mean of a chunk is neither a loss nor a metric of all tokens."""
    with pytest.raises(RankFailure, match=r"loss_fn returned a mean for a chunk of the tokens.*return a pair"):
        ranks(2, train_with_a_mean)
    halves = triax.chunked(lambda logits, labels: Loss({"all": (logits.sum(), 1.0)}, {}, {"half": logits.mean()}), 2)
    with pytest.raises(ValueError, match="a mean for 'half'"):
        halves.of_head(LastLayer(nn.Identity()), torch.ones(1, 8, 4), torch.zeros(1, 8))


def test_chunked_refuses_modules_with_weights_and_no_tokens() -> None:
    with pytest.raises(TypeError, match="a module with parameters, which would get no gradients"):
        triax.chunked(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="chunked was given tokens=0"):
        triax.chunked(Scores(), tokens=0)


def test_chunked_losses_refuse_other_weights_and_wrong_shapes() -> None:
    """A loss with a trained bias of its own, labels of 4 for 8 tokens, and a tuple in place of one tensor."""
    head, own = nn.Linear(4, 6), torch.zeros(6, requires_grad=True)
    x, labels = torch.ones(1, 8, 4, requires_grad=True), torch.zeros(1, 8, dtype=torch.long)

    def biased(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return (logits + own).sum(), labels.numel()

    with pytest.raises(TypeError, match=r"a parameter of shape \(6,\) that is not the last layer's"):
        loss_in_chunks(LastLayer(head, head), biased, x, labels, 2)
    with pytest.raises(ValueError, match=r"labels of shape \(1, 4\) do not fit the 8 tokens of each of 1 rows"):
        loss_in_chunks(LastLayer(head, head), biased, x, labels[:, :4], 2)
    with pytest.raises(ValueError, match="the input of the last layer is a tuple"):
        loss_in_chunks(LastLayer(head, head), biased, (x, x), labels, 2)


def test_flops_of_chunked_losses_equal_those_of_whole_logits() -> None:
    counts = []
    for tokens in (None, 3):
        grid = Grid()
        features: dict[str, Any] = {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}
        module = tiny_gpt(grid, loss_fn=NextTokenLoss(grid, VOCABULARY, chunk_tokens=tokens), **features)
        engine = pipeline_engine(module, triax.Batch(size=4, microbatch=2))
        found: list[FlopCounter] = []

        def counting(span: OpenSpan, found: list[FlopCounter] = found) -> FlopCounter:
            found.append(FlopCounter())
            return found[-1]

        engine.spans.read(counting, "stage")
        engine.train_batch(microbatches(grid, text_batches(VOCABULARY, 4, LENGTH, 1), 2))
        counts.append(sum(counter.flops for counter in found))
    assert counts[0] == counts[1] > 0
