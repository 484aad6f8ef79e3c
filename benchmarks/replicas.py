"""Contenders on the data axis: each trains the same stack on its own microbatches, with AdamW."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rounds import Contender, deepspeed_engine
from stacks import Batch, Stack
from torch import Tensor, nn

import triax

LEARNING_RATE = 1e-4
BUCKET = 2**20  # elements: of this many gradients a collective is made, whoever makes it
DDP = "DDP"


def share(stack: Stack, microbatches: int) -> Batch:
    """This rank's microbatches."""
    rank = dist.get_rank()
    return stack.batch(microbatches * dist.get_world_size())[rank * microbatches : (rank + 1) * microbatches]


def plain(stack: Stack, microbatches: int) -> dict[str, Tensor]:
    """Reference: plain autograd's gradients of all replicas' microbatches."""
    model = stack.whole()
    batch = stack.batch(microbatches * dist.get_world_size())
    for inputs, labels in batch:
        (stack.loss(model(inputs), labels) / len(batch)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Optimizer of every contender: torch's fused AdamW."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


class Triax:
    """triax's engine."""

    def __init__(self, stack: Stack, microbatches: int, zero: dict[str, Any]) -> None:
        module = triax.PipelineModule(
            [triax.LayerSpec(stack.build, index) for index in range(stack.entries)],
            grid=triax.Grid(),
            loss_fn=stack.loss,
        )
        self.engine: Any = triax.Engine(
            module,
            batch=triax.Batch(microbatch=stack.microbatch, microbatches=microbatches),
            zero={"bucket_size": BUCKET, **zero},
            optimizer=adamw,
        )
        self._data = itertools.cycle(share(stack, microbatches))

    def step(self) -> None:
        self.engine.train_batch(self._data)

    def gradients(self) -> dict[str, Tensor]:
        self.step()
        return {name.removeprefix("layers."): g for name, g in self.engine.gather("gradients").items()}


class Loop:
    """A training loop around a model of torch's that reduces by itself."""

    model: nn.Module

    def __init__(self, stack: Stack, microbatches: int) -> None:
        self._stack, self._batch = stack, share(stack, microbatches)

    def step(self) -> None:
        self._differentiate()
        self._optimizer.step()

    def _optimize(self, model: nn.Module) -> None:
        self.model, self._optimizer = model, adamw(model.parameters())

    def _differentiate(self) -> None:
        self._optimizer.zero_grad()
        for i, (inputs, labels) in enumerate(self._batch):
            with self._microbatch(i == len(self._batch) - 1):
                (self._stack.loss(self.model(inputs), labels) / len(self._batch)).backward()

    def _microbatch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        raise NotImplementedError


class Silent(Loop):
    """The arithmetic of a data axis without its messages: the numbers are wrong, the time is what is left of a step.

    Args:
        sharded: step this rank's share of the weights only, as stages 1 to 3 do.
    """

    def __init__(self, stack: Stack, microbatches: int, sharded: bool) -> None:
        super().__init__(stack, microbatches)
        self.model = stack.whole()
        parameters = list(self.model.parameters())
        self._stepped: list[nn.Parameter] = []
        if sharded:
            size = -(-sum(p.numel() for p in parameters) // dist.get_world_size())
            self._stepped = [nn.Parameter(torch.zeros(size))]
            self._stepped[0].grad = torch.zeros(size)
        self._optimizer = adamw(self._stepped or parameters)

    def _differentiate(self) -> None:
        if not self._stepped:
            super()._differentiate()
            return
        self.model.zero_grad()
        for inputs, labels in self._batch:
            (self._stack.loss(self.model(inputs), labels) / len(self._batch)).backward()

    def gradients(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _microbatch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Ddp(Loop):
    """DistributedDataParallel, which reduces in the last backward pass only."""

    def __init__(self, stack: Stack, microbatches: int) -> None:
        super().__init__(stack, microbatches)
        size = BUCKET * 4 / 2**20
        self._optimize(
            nn.parallel.DistributedDataParallel(stack.whole(), bucket_cap_mb=size, gradient_as_bucket_view=True)
        )

    def gradients(self) -> dict[str, Tensor]:
        self._differentiate()
        module = self.model.module
        assert isinstance(module, nn.Module)
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    def _microbatch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.model.no_sync()  # type: ignore[operator]


class Fsdp(Loop):
    """FSDP2: every entry a unit.

    Args:
        reshard: gather weights again for the backward pass, as stage 3 does; else keep them from the forward.
        kept: within a step keep weights whole and reduce once, as stage 1 does.
        group: size of the groups of ranks that shard (hybrid sharding); None: all ranks are one.
    """

    def __init__(self, stack: Stack, microbatches: int, reshard: bool, kept: bool, group: int | None = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(stack, microbatches)
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // (group or ranks), group or ranks), mesh_dim_names=("copies", "shards"))
        model = stack.whole()
        for entry in model:
            fully_shard(entry, mesh=mesh if group else mesh["shards"], reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh if group else mesh["shards"], reshard_after_forward=False)
        self._kept, self._grouped = kept, group is not None
        self._optimize(model)

    def gradients(self) -> dict[str, Tensor]:
        self._differentiate()
        return {name: p.grad.full_tensor() for name, p in self.model.named_parameters()}  # type: ignore[union-attr]

    def _microbatch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if self._kept:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            self.model.set_reshard_after_backward(last)  # type: ignore[operator]
        if self._grouped:  # between the groups, once a step
            self.model.set_requires_all_reduce(last)  # type: ignore[operator]
        return contextlib.nullcontext()


class DeepSpeed:
    """DeepSpeed's engine."""

    def __init__(self, stack: Stack, microbatches: int, stage: int) -> None:
        model = stack.whole()
        sizes = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        self._engine = deepspeed_engine(
            *(model, adamw(model.parameters()), stack.microbatch),
            gradient_accumulation_steps=microbatches,
            zero_allow_untested_optimizer=True,
            zero_optimization=zero | dict.fromkeys(sizes, BUCKET),
        )
        self._stack, self._batch = stack, share(stack, microbatches)

    def step(self) -> None:
        self._run()

    def gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found: dict[str, Tensor] = {}
        named = list(self._engine.module.named_parameters())
        self._run(lambda: found.update({name: safe_get_full_grad(p).clone() for name, p in named}))
        return found

    def _run(self, before_step: Callable[[], None] | None = None) -> None:
        for i, (inputs, labels) in enumerate(self._batch):
            self._engine.backward(self._stack.loss(self._engine(inputs), labels))
            if before_step is not None and i == len(self._batch) - 1:
                before_step()
            self._engine.step()


class Maker(NamedTuple):
    """A contender: its name, how to make it, and what its method must send in a step.

    ``collectives`` counts reduce-scatters and all-gathers of all weights; an all-reduce is two of them. ``sharded`` is
    True if each rank steps only its share of the weights. Ranks shard in groups of ``group``; None: all together.
    """

    name: str
    make: Callable[[], Contender]
    collectives: int
    sharded: bool = True
    group: int | None = None

    def must_send(self, stack: Stack) -> float:
        """Bytes that each rank must send in a step."""
        size, ranks = sum(p.numel() * p.element_size() for p in stack.whole().parameters()), dist.get_world_size()
        group = self.group or ranks
        copies = ranks // group
        return self.collectives * size * (group - 1) / group + 2 * size / group * (copies - 1) / copies


def contenders(stack: Stack, microbatches: int) -> Iterator[Maker]:
    """DDP, triax's stages, then its peers."""
    yield Maker(DDP, lambda: Ddp(stack, microbatches), 2, sharded=False)
    once, kept = {"reduce_each_microbatch": False}, {"keep_gathered": True}
    for name, zero, collectives in (
        ("triax stage 0", {"stage": 0}, 2),
        ("triax stage 1", {"stage": 1}, 2),
        ("triax stage 2", {"stage": 2}, 1 + microbatches),
        ("triax stage 2, reducing once", {"stage": 2, **once}, 2),
        ("triax stage 3", {"stage": 3}, 3 * microbatches),
        ("triax stage 3, reducing once", {"stage": 3, **once}, 2 * microbatches + 1),
        ("triax stage 3, kept", {"stage": 3, **kept}, 1 + microbatches),
        ("triax stage 3, kept, reducing once", {"stage": 3, **kept, **once}, 2),
    ):
        make = partial(Triax, stack, microbatches, zero)
        yield Maker(name, make, collectives, sharded=zero["stage"] != 0)
    for name, reshard, keep, collectives in (
        ("FSDP2, resharding", True, False, 3 * microbatches),
        ("FSDP2, not resharding", False, False, 2 * microbatches),
        ("FSDP2, kept, reducing once", False, True, 2),
    ):
        yield Maker(name, partial(Fsdp, stack, microbatches, reshard, keep), collectives)
    if dist.get_world_size() >= 4:
        groups: dict[str, Callable[[], Contender]] = {
            "triax stage 3, groups of 2": partial(Triax, stack, microbatches, {"stage": 3, "shard_size": 2}),
            "FSDP2, groups of 2": partial(Fsdp, stack, microbatches, True, False, 2),
        }
        yield from (Maker(name, make, 3 * microbatches, group=2) for name, make in groups.items())
    for stage, collectives in ((1, 2), (2, 1 + microbatches), (3, 3 * microbatches)):
        yield Maker(f"DeepSpeed stage {stage}", partial(DeepSpeed, stack, microbatches, stage), collectives)
