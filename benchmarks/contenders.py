"""Contenders of the pipeline benchmark: each trains a stack on the ranks of one pipe axis, a step per call, by SGD."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from limits import seconds_per_message, stage_costs
from measuring import slowest
from rounds import ALONE, Contender, Makers, deepspeed_engine, load_deepspeed, quiet
from stacks import Entry, Stack
from torch import Tensor, nn

import triax

LEARNING_RATE = 1e-3


class PipelineContender(Contender, Protocol):
    """One rank's part of a pipeline. Its gradients are those of its entries, by ``entry.parameter``.

    Attributes:
        ops: forwards and backwards (whole, or both halves) that the busiest rank runs in a step.
        schedule: the order in which it runs them. None without a pipeline.
    """

    ops: int
    schedule: triax.Schedule | None


class OneProcess:
    """The first rank alone, with the whole stack and no pipeline: what the others are measured against."""

    def __init__(self, stack: Stack, pipe: int, microbatches: int) -> None:
        self._stack, self._batch, self._count = stack, stack.batch(microbatches), microbatches
        self._model = stack.whole()
        self._optimizer = _sgd(self._model.parameters())
        self.ops = 2 * microbatches * pipe
        self.schedule: triax.Schedule | None = None

    def step(self) -> None:
        if dist.get_rank() == 0:
            self._differentiate()
            self._optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        self._differentiate()
        return _named(dict(enumerate(self._model)))

    def _differentiate(self) -> None:
        self._optimizer.zero_grad()
        for inputs, labels in self._batch:
            (self._stack.loss(self._model(inputs), labels) / self._count).backward()


class Triax:
    """triax's engine."""

    def __init__(self, stack: Stack, pipe: int, microbatches: int, schedule: str, chunks: int) -> None:
        module = triax.PipelineModule(
            [triax.LayerSpec(stack.build, index) for index in range(stack.entries)],
            grid=triax.Grid(pipe=pipe),
            loss_fn=stack.loss,
            partition="uniform",
            chunks=chunks,
        )
        config = {
            "train_micro_batch_size_per_gpu": stack.microbatch,
            "gradient_accumulation_steps": microbatches,
            "pipeline": {"schedule": schedule},
        }
        self.engine, *_ = triax.initialize(model=module, config=config, optimizer=_sgd)
        made = triax.make_schedule(schedule, pipe, microbatches, chunks)
        self.schedule: triax.Schedule | None = made
        self._simulated = triax.simulate(made).peak_activations
        self.ops = max(map(len, made.orders))
        self._data = itertools.cycle(stack.batch(microbatches))

    def step(self) -> None:
        self.engine.train_batch(self._data)

    def gradients(self) -> dict[str, Tensor]:
        self.engine.train_batch(self._data)
        mine = {name for name, _ in self.engine.module.named_parameters()}
        whole = self.engine.gather("gradients")
        return {name.removeprefix("layers."): whole[name] for name in mine}

    def activations(self) -> tuple[float, float]:
        """The most activations this rank held in the last step, and how many the simulation says it holds."""
        grid, module = self.engine.grid, self.engine.module
        return self.engine.executor.last_run.peak / module.chunks, self._simulated[grid.pipe.rank]


class Torch:
    """torch.distributed.pipelining, as its documentation uses it, each stage one ``nn.Module``."""

    def __init__(self, stack: Stack, pipe: int, microbatches: int, schedule: str, chunks: int) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        rank, stages = dist.get_rank(), pipe * chunks
        mine = list(range(rank, stages, pipe))
        if schedule == "ScheduleZBVZeroBubble":
            mine = [rank, stages - 1 - rank]
        cut = stack.entries // stages
        self._entries: dict[int, nn.Module] = {}
        parts = []
        for stage in mine:
            entries = {index: stack.build(index) for index in range(stage * cut, (stage + 1) * cut)}
            parts.append(PipelineStage(nn.Sequential(*entries.values()), stage, stages, torch.device("cpu")))
            self._entries.update(entries)
        make = getattr(schedules, schedule)
        self._schedule = make(parts[0] if chunks == 1 else parts, microbatches, loss_fn=stack.loss)
        self.schedule: triax.Schedule | None = triax.make_schedule("1f1b", pipe, microbatches)
        self.ops = 2 * microbatches
        if chunks > 1:
            table = self._schedule.pipeline_order
            orders = [[str(op) for op in table[rank] if op is not None] for rank in sorted(table)]
            # simulated with split backwards only: a whole one is both halves in a row
            split = (
                ",".join(op.replace("B", "I") + "," + op.replace("B", "W") if "B" in op else op for op in order)
                for order in orders
            )
            self.schedule = triax.Schedule.from_csv("\n".join(split), schedule)
            self.ops = max(map(len, orders))
        parameters = [parameter for entry in self._entries.values() for parameter in entry.parameters()]
        self._optimizer = _sgd(parameters)
        inputs, labels = (torch.cat(tensors) for tensors in zip(*stack.batch(microbatches), strict=True))
        self._inputs = (inputs,) if 0 in mine else ()
        self._labels = {"target": labels, "losses": []} if stages - 1 in mine else {}

    def step(self) -> None:
        self._differentiate()
        self._optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        self._differentiate()
        return _named(self._entries)

    def _differentiate(self) -> None:
        self._optimizer.zero_grad()
        self._schedule.step(*self._inputs, **self._labels, return_outputs=False)


class DeepSpeed:
    """DeepSpeed's PipelineEngine: 1F1B, the one schedule it has."""

    def __init__(self, stack: Stack, pipe: int, microbatches: int) -> None:
        load_deepspeed()
        with quiet(), torch.random.fork_rng(devices=[]):  # it seeds torch
            from deepspeed.pipe import LayerSpec, PipelineModule

            module = PipelineModule(
                [LayerSpec(Entry, index, stack) for index in range(stack.entries)],
                num_stages=pipe,
                loss_fn=stack.loss,
                partition_method="uniform",
            )
        optimizer = _sgd(module.parameters())
        self._engine = deepspeed_engine(module, optimizer, stack.microbatch, gradient_accumulation_steps=microbatches)
        start = module._local_start
        self._entries = {start + i: layer for i, layer in enumerate(module.forward_funcs)}
        self._data = itertools.cycle(stack.batch(microbatches))
        self.ops = 2 * microbatches
        self.schedule: triax.Schedule | None = triax.make_schedule("1f1b", pipe, microbatches)

    def step(self) -> None:
        self._engine.train_batch(self._data)

    def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        # It clears gradients in its step: read them as that begins.
        hook = self._engine.optimizer.register_step_pre_hook(lambda *_: found.update(_named(self._entries)))
        self._engine.train_batch(self._data)
        hook.remove()
        return found


class Silent:
    """The arithmetic of the stages, on all ranks at once and without messages: costs for the simulation of a schedule.

    Args:
        chunks: stages per rank.
    """

    def __init__(self, stack: Stack, grid: triax.Grid, microbatches: int, chunks: int) -> None:
        self._grid, self._count, self._stack = grid, microbatches, stack
        stages = grid.size * chunks
        cut = stack.entries // stages
        self._last = stages - 1
        self._stages = {
            stage: nn.Sequential(*(stack.build(index) for index in range(stage * cut, (stage + 1) * cut)))
            for stage in range(grid.rank, stages, grid.size)
        }
        self._parameters = [p for stage in self._stages.values() for p in stage.parameters()]
        self._optimizer = _sgd(self._parameters)
        ((self._inputs, self._labels),) = stack.batch(1)
        with torch.no_grad():
            self._hidden = stack.build(0)(self._inputs)
        self._message = seconds_per_message(grid, self._hidden)

    def measure(self) -> tuple[triax.Costs, float]:
        """Return the costs of the stages, and the time of the optimizer's step on the slowest rank. Collective."""
        costs = {}
        for stage, module in self._stages.items():
            x = self._inputs if stage == 0 else self._hidden.clone().requires_grad_()
            wanted = x if x.requires_grad else next(module.parameters())

            def forward(x: Tensor = x, module: nn.Module = module, last: bool = stage == self._last) -> Tensor:
                outputs = module(x)
                return self._stack.loss(outputs, self._labels) if last else outputs

            costs[stage] = stage_costs(self._grid, forward, wanted, self._count)
        step = slowest(self._grid, self._optimizer.step)
        known = [dict(each) for each in self._grid.world.all_gather_json(list(costs.items()))]
        ordered = [next(each[stage] for each in known if stage in each) for stage in range(self._last + 1)]
        forwards, inputs, weights = (list(kind) for kind in zip(*ordered, strict=True))
        return triax.Costs(F=forwards, I=inputs, W=weights, COMM=self._message), step


def contenders(stack: Stack, pipe: int, microbatches: int) -> Makers[PipelineContender]:
    """Names, and how to make them; the one process first."""
    yield ALONE, partial(OneProcess, stack, pipe, microbatches)
    for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
        yield f"triax {schedule}", partial(Triax, stack, pipe, microbatches, schedule, chunks)
    for schedule, chunks in (("Schedule1F1B", 1), ("ScheduleInterleavedZeroBubble", 2), ("ScheduleZBVZeroBubble", 2)):
        yield f"torch {schedule}", partial(Torch, stack, pipe, microbatches, schedule, chunks)
    yield "DeepSpeed PipelineEngine", partial(DeepSpeed, stack, pipe, microbatches)


def _sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=LEARNING_RATE)


def _named(entries: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": parameter.grad.clone()
        for index, entry in entries.items()
        for name, parameter in entry.named_parameters()
        if parameter.grad is not None
    }
