"""Models of a test, their training by an engine and by plain PyTorch, and one form of result for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import triax
from triax import Grid, PipelineModule
from triax.models.gpt import GPTConfig, GPTLoss, gpt_layers

from support.toys import mean_loss


@dataclass
class Step:
    """Values of one optimizer step."""

    loss: float
    norm: float  # of the gradients before they are clipped
    gradients: dict[str, Tensor]  # divided and clipped
    weights: dict[str, Tensor]  # after the step
    metrics: dict[str, Any] = field(default_factory=dict)  # of losses with names


SGD = partial(torch.optim.SGD, lr=0.1)


def pipeline_engine(module: PipelineModule, batch: triax.Batch, stage: Any = 0, **more: Any) -> triax.PipelineEngine:
    """Return an engine with SGD in a stage of ZeRO. ``more``: other arguments of ``Engine``."""
    engine = triax.Engine(module, batch=batch, **{"optimizer": SGD, "zero": triax.Zero(stage=stage), **more})
    assert isinstance(engine, triax.PipelineEngine)
    return engine


def tiny_gpt(grid: Grid, *, sequence_parallel: bool = False, seed: int = 7, **more: Any) -> PipelineModule:
    """Return a GPT in float64. ``more``: fields of GPTConfig, and arguments of PipelineModule (``chunks``, ...)."""
    fields = {name: more.pop(name) for name in list(more) if name in GPTConfig.__dataclass_fields__}
    shape = {
        "vocab_size": 37,
        "max_position_embeddings": 8,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = GPTConfig(**{**shape, **fields})
    layers = gpt_layers(config, sequence_parallel=sequence_parallel)
    loss = GPTLoss(grid, vocab_size=config.vocab_size)
    return PipelineModule(layers, grid=grid, **{"loss_fn": loss, "dtype": torch.float64, "seed": seed, **more})


def text_batches(vocab_size: int, samples: int, length: int, steps: int, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return one batch for each step: token ids and the tokens that follow them, each (samples, length)."""
    shape = (steps, samples, length + 1)
    text = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    return [(batch[:, :-1], batch[:, 1:]) for batch in text]


def microbatches(grid: Grid, batches: Iterable[tuple[Any, ...]], size: int = 1) -> Iterator[tuple[Any, ...]]:
    """Yield this replica's microbatches of ``size`` samples, batch after batch."""
    for batch in batches:
        share = len(batch[0]) // grid.data.size
        for first in range(grid.data.rank * share, (grid.data.rank + 1) * share, size):
            yield tuple(part[first : first + size] for part in batch)


def small_config(
    optimizer: str | dict[str, Any] = "SGD",
    lr: Any = 0.1,
    *,
    batch: int | None = None,
    micro: int | None = None,
    accumulation: int | None = None,
    stage: int | None = None,
    zero: dict[str, Any] | None = None,
    clip: float | None = None,
    schedule: str | None = None,
    params: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a configuration in DeepSpeed's keys.

    ``zero``: all of ``zero_optimization``, in place of its stage. ``params``: of the optimizer, beside ``lr``.
    ``more``: other keys.
    """
    given = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": optimizer, "params": {"lr": lr, **(params or {})}}
        if isinstance(optimizer, str)
        else optimizer,
        "zero_optimization": zero if stage is None else {"stage": stage},
        "pipeline": None if schedule is None else {"schedule": schedule},
    }
    return {key: value for key, value in given.items() if value is not None} | more


def module_engine(model: nn.Module, grid: Grid, micro: int, stage: int = 3, **zero: Any) -> triax.ModuleEngine:
    """Return an engine of a plain module with SGD. ``zero``: other keys of ``zero_optimization``."""
    config = small_config(micro=micro, zero={"stage": stage, **zero})
    engine = triax.initialize(model=model, config=config, grid=grid)[0]
    assert isinstance(engine, triax.ModuleEngine)
    return engine


def mean_square(outputs: Tensor, labels: object = None) -> Tensor:
    """Mean square of outputs, where there are no labels."""
    return outputs.square().mean()


def whole_batches(batch: Callable[[int, int], Any], steps: int, replicas: int) -> list[list[tuple[Any, ...]]]:
    """Return for each step the batches of all replicas, without labels, as ``train_plain`` takes them."""
    return [[(batch(step, replica), None) for replica in range(replicas)] for step in range(steps)]


def train(engine: triax.PipelineEngine, data: Any, steps: int, evaluated: Any = ()) -> list[Step]:
    """Train a pipeline. Each rank gets the gathered gradients and weights of the whole model.

    ``evaluated``: the same data again. An evaluation before each step must have the step's loss and metrics.
    """
    found = []
    for _ in range(steps):
        before = None if evaluated == () else (engine.eval_batch(evaluated).item(), engine.metrics)
        loss, metrics = engine.train_batch(data).item(), dict(engine.metrics)
        if before is not None:
            torch.testing.assert_close(before, (loss, metrics), rtol=1e-10, atol=1e-13)
        norm = engine.grad_norm
        assert norm is not None
        found.append(Step(loss, norm, engine.gather("gradients"), engine.gather(), metrics))
    return found


def train_module(
    engine: triax.ModuleEngine,
    batches: Iterable[Iterable[tuple[Any, ...]]],
    loss_fn: Callable[..., Tensor] = mean_loss,
) -> list[Step]:
    """Train a plain module. ``batches`` has this replica's microbatches of each step: inputs, then labels."""
    found = []
    for batch in batches:
        total = 0.0
        for *inputs, labels in batch:
            loss = loss_fn(engine(*inputs), labels)
            engine.backward(loss)
            total += loss.item()
            engine.step()
        norm = engine.grad_norm
        assert norm is not None
        found.append(Step(total / engine.batch.accumulation, norm, engine.gather("gradients"), engine.gather()))
    return found


def train_plain(
    model: nn.Module,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    batches: Iterable[Iterable[tuple[Any, ...]]],
    loss_fn: Callable[..., Any] = mean_loss,
    clip: float | None = None,
    parameters: Iterable[Any] | None = None,
    forward: Callable[..., Any] | None = None,
    named: dict[str, Any] | None = None,
) -> list[Step]:
    """Train in one process with PyTorch alone. A batch holds the microbatches of all replicas; their mean counts.

    ``loss_fn`` returns the loss, or a pair of it and metrics. ``forward`` runs the model if its own does not.
    ``named``: the parameters by other names than the model's.
    """
    named = dict(model.named_parameters()) if named is None else named
    trained = {name: p for name, p in named.items() if p.requires_grad}
    optimizer = make_optimizer(list(trained.values()) if parameters is None else list(parameters))
    found = []
    for batch in batches:
        optimizer.zero_grad()
        returned = [loss_fn((forward or model)(*inputs), labels) for *inputs, labels in batch]
        losses, metrics = zip(*(each if isinstance(each, tuple) else (each, {}) for each in returned), strict=True)
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained.values(), float("inf") if clip is None else clip).item()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in named.items()}
        means = {name: torch.stack([each[name] for each in metrics]).mean().item() for name in metrics[0]}
        found.append(Step(loss.item(), norm, gradients, weights, means))
    return found


def assert_steps_equal(found: list[Step], wanted: list[Step], rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Compare all values of all steps. Every name of ``wanted`` must be there, and no other."""
    assert len(found) == len(wanted)
    for number, (step, other) in enumerate(zip(found, wanted, strict=True)):
        assert step.gradients.keys() == other.gradients.keys() and step.weights.keys() == other.weights.keys()

        def message(text: str, number: int = number) -> str:
            return f"step {number}: {text}"

        torch.testing.assert_close(vars(step), vars(other), rtol=rtol, atol=atol, msg=message)
