"""Offload: it changes no number; resident memory of a run; errors before the first step."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import notes_of
from triax.compat.deepspeed.from_config import read_config
from triax.options.zero import OffloadOptimizer
from triax.zero import gathered
from triax.zero.sub_groups import sub_groups

from support.foreign_optimizers import StartsWithState
from support.resident import Growth, own_pages, rest, status
from support.toys import error_text, same
from support.training import Step, assert_steps_equal, pipeline_engine, train

WIDTH, SAMPLES, STEPS = 9, 8, 3


def nvme(path: Path) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(path)}


class Layer(nn.Module):
    """x + linear(x): gradients of all layers are of one size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + 0.1 * self.linear(x)
        return y


def batches(grid: Grid, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    share = SAMPLES // grid.data.size
    while True:
        x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for sample in range(grid.data.rank * share, (grid.data.rank + 1) * share, 2):
            yield x[sample : sample + 2], x[sample : sample + 2].roll(1, -1)


def squares(y: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(y, labels.to(y.dtype))  # torch 2.11 differentiates no mse_loss of two dtypes


def model_of(grid: Grid, dtype: torch.dtype | None) -> PipelineModule:
    """Four layers with one frozen bias. Each call gives equal weights."""
    torch.manual_seed(0)
    layers = [LayerSpec(Layer, WIDTH) for _ in range(4)]
    model = PipelineModule(layers, grid=grid, loss_fn=squares, dtype=dtype, partition="uniform")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "layers.2.linear.bias")
    return model


def groups_of(named: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Two parameter groups: biases learn at half the rate, and do not decay."""
    biases = [p for name, p in named.items() if name.endswith("bias")]
    weights = [p for name, p in named.items() if not name.endswith("bias")]
    return [{"params": biases, "lr": 0.005, "weight_decay": 0.0}, {"params": weights}]


def slower_each_step(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def engine_of(grid: Grid, zero: dict[str, Any], optimizer: str = "AdamW", **options: Any) -> Any:
    model = model_of(grid, None if {"bf16", "fp16"} & options.keys() else torch.float64)
    kind, params = OPTIMIZERS[optimizer]
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": params},
        "gradient_clipping": 0.2,
        "zero_optimization": {"reduce_bucket_size": 200, **zero},
        **options,
    }
    groups = groups_of(dict(model.named_parameters()))
    return triax.initialize(model=model, model_parameters=groups, config=config, lr_scheduler=slower_each_step)[0]


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "SGD with momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "SGD": ("SGD", {"lr": 0.1}),
    "Adam": ("Adam", {"adam_w_mode": False, "weight_decay": 0.1, "amsgrad": True}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.5}),
    **{kind: (kind, {}) for kind in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")},
}


def plain_steps(optimizer: str, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Step]:
    """Steps of torch's optimizer on one process, for masters of float32 if the model is in a smaller dtype."""
    start = model_of(Grid(), torch.float64 if dtype == torch.float64 else torch.float32)
    masters = {name: parameter.detach().clone() for name, parameter in start.named_parameters()}
    model, (kind, params) = model_of(Grid(), dtype), OPTIMIZERS[optimizer]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trained = {name: masters[name] for name in named}
    params = {key: value for key, value in params.items() if key != "adam_w_mode"}  # DeepSpeed's name of Adam, not W
    torchs = getattr(torch.optim, kind)(groups_of(trained), **params)
    schedule, data, steps = slower_each_step(torchs), batches(Grid()), []
    for _ in range(STEPS):
        losses, gradients = [], {name: torch.zeros_like(master) for name, master in trained.items()}
        for x, labels in (next(data) for _ in range(SAMPLES // 2)):
            losses.append(squares(model(x.to(dtype)), labels.to(torch.promote_types(dtype, torch.float32))))
            found = torch.autograd.grad(losses[-1] * scale, [*named.values()])
            for sums, gradient in zip(gradients.values(), found, strict=True):
                sums += gradient.to(sums.dtype) / scale / (SAMPLES // 2)
        for name, master in trained.items():
            master.grad = gradients[name]
        norm = nn.utils.clip_grad_norm_(trained.values(), 0.2).item()  # changes the gradients too
        torchs.step()
        schedule.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        steps.append(Step(torch.stack(losses).double().mean().item(), norm, gradients, weights))
    return steps


def offloaded_steps(
    sizes: dict[str, Any], stage: int, optimizer: str, options: dict[str, Any], path: Path
) -> list[list[Step]]:
    """Steps with each way to offload, and without; sub-groups are much smaller than a bucket."""
    host, disk, found = {"device": "cpu"}, nvme(path), []
    ways: list[dict[str, Any]] = [{"offload_optimizer": host}, {"offload_optimizer": disk}, {}]
    if stage == 3:
        ways += [{"offload_param": {**host, "pin_memory": True}}, {"offload_param": disk}]
        ways += [{"offload_optimizer": disk, "offload_param": disk}]
    for way in ways:
        zero = {"stage": stage, "sub_group_size": 17, **way}
        engine = engine_of(Grid(**sizes, timeout=60), zero, optimizer, **options)
        assert os.listdir(path) == []  # what is on the disk has no name
        found.append(train(engine, batches(engine.grid, torch.float32 if options else torch.float64), STEPS))
        assert {int(state["step"]) for state in engine.optimizer.state.values() if "step" in state} <= {STEPS}
    return found


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [
        # Momentum alone on one process, below; here in the sweep.
        *(pytest.param(s, "AdamW", marks=() if s == 3 else pytest.mark.exhaustive) for s in range(4)),
        *(pytest.param(s, "SGD with momentum", marks=pytest.mark.exhaustive) for s in range(4)),
    ],
)
def test_offload_on_four_ranks_steps_as_plain_torch(ranks: Any, stage: int, optimizer: str, tmp_path: Path) -> None:
    wanted = plain_steps(optimizer)
    for found in ranks(4, offloaded_steps, {"pipe": 2, "data": 2}, stage, optimizer, {}, tmp_path):
        for steps in found:
            assert_steps_equal(steps, wanted, atol=1e-13)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "AdamW"])
def test_offload_steps_any_optimizer_as_plain_torch(ranks: Any, optimizer: str, tmp_path: Path) -> None:
    [found] = ranks(1, offloaded_steps, {}, 2, optimizer, {}, tmp_path)
    for steps in found:
        assert_steps_equal(steps, plain_steps(optimizer), atol=1e-13)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("options", "dtype", "scale"),
    [
        pytest.param({"bf16": {"enabled": True}}, torch.bfloat16, 1, marks=pytest.mark.exhaustive, id="bf16"),
        pytest.param({"fp16": {"enabled": True, "initial_scale_power": 8}}, torch.float16, 256, id="fp16"),
    ],
)
def test_offloaded_fp32_masters_train_as_plain_mixed_precision(
    ranks: Any, stage: int, options: dict[str, Any], dtype: torch.dtype, scale: float, tmp_path: Path
) -> None:
    wanted = plain_steps("AdamW", dtype, scale)
    for found in ranks(2, offloaded_steps, {"data": 2}, stage, "AdamW", options, tmp_path):
        for steps in found:
            assert_steps_equal(steps, wanted, rtol=1e-6, atol=1e-7)


def overflowed(path: Path) -> None:
    grid = Grid(data=2, timeout=60)
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}
    engine = engine_of(grid, {"stage": 2, "offload_optimizer": nvme(path), "sub_group_size": 17}, fp16=fp16)
    data = batches(grid, torch.float32)
    engine.train_batch(data)
    before = engine.gather()
    parameter = next(engine.module.parameters())
    handle = parameter.register_hook(lambda g: g * math.inf) if grid.rank == 1 else None
    engine.train_batch(data)
    if handle is not None:
        handle.remove()
    same(engine.gather(), before, 0, 0)
    engine.train_batch(data)
    after = engine.gather()
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())


def test_an_overflow_skips_the_step_of_offloaded_masters(ranks: Any, tmp_path: Path) -> None:
    ranks(2, overflowed, tmp_path)


def lent(path: Path) -> None:
    """Values written into gathered weights reach the shards and masters on disk."""
    grid = Grid(data=2, timeout=60)
    found = []
    for zero in ({}, {"offload_optimizer": nvme(path), "offload_param": nvme(path), "sub_group_size": 17}):
        engine = engine_of(grid, {"stage": 3, **zero}, bf16={"enabled": True})
        data = batches(grid, torch.float32)
        engine.train_batch(data)
        weight = dict(engine.module.named_parameters())["layers.1.linear.weight"]
        with gathered(weight, modifier_rank=0), torch.no_grad():
            weight[0] += 1
        engine.train_batch(data)
        found.append(engine.gather())
    same(found[0], found[1], 0, 0)


def test_weights_written_while_gathered_reach_masters_on_disk(ranks: Any, tmp_path: Path) -> None:
    ranks(2, lent, tmp_path)


def test_hooks_and_schedulers_see_all_sub_groups_as_one_step(tmp_path: Path) -> None:
    """Hooks and schedulers see one step although there are several sub-groups, and the state is over whole masters."""
    engine = engine_of(Grid(), {"stage": 1, "offload_optimizer": nvme(tmp_path)})
    optimizer = engine.optimizer
    assert optimizer is not None
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    data = batches(engine.grid)
    for _ in range(2):
        engine.train_batch(data)
    assert calls == ["before", "after"] * 2 and engine.get_lr() == pytest.approx([0.005 / 3, 0.01 / 3])
    assert all(group["fused"] for group in optimizer.param_groups)
    for bucket in engine.data_axis.buckets:
        assert bucket.master is not None
        state = optimizer.state[bucket.master]
        assert state["exp_avg"].shape == bucket.master.shape and int(state["step"]) == 2
    # State that was loaded in its place is taken, and moved to where it belongs.
    optimizer.load_state_dict(optimizer.state_dict())
    engine.train_batch(data)
    wanted = engine_of(Grid(), {"stage": 1})
    data = batches(wanted.grid)
    for _ in range(3):
        wanted.train_batch(data)
    same(engine.gather(), wanted.gather())
    assert {engine.data_axis.memory.place(s["exp_avg"]) for s in optimizer.state.values()} == {"nvme"}


class _Range:
    def __init__(self, numel: int, tie: int | None = None, state: str | None = None) -> None:
        self.owned, self.tie, self.state = (numel, 2 * numel), tie, state


@pytest.mark.parametrize("size", [1, 3, 7, 10, 100])
def test_sub_groups_cover_each_element_once_in_order(size: int) -> None:
    buckets: Any = [_Range(n) for n in (5, 0, 1, 13)]
    groups = list(sub_groups(buckets, size))
    assert all(sum(piece.stop - piece.start for piece in pieces) == size for pieces in groups[:-1])
    elements = [(id(p.bucket), i) for pieces in groups for p in pieces for i in range(p.start, p.stop)]
    assert elements == [(id(bucket), i) for bucket in buckets for i in range(bucket.owned[1] - bucket.owned[0])]


@pytest.mark.parametrize(("size", "pieces"), [(1, 64), (100, 64), (128, 128), (1000, 960)])
def test_sub_groups_of_stored_state_are_whole_blocks(size: int, pieces: int) -> None:
    buckets: Any = [_Range(640, state="int8"), _Range(320)]
    groups = [sum(piece.stop - piece.start for piece in group) for group in sub_groups(buckets, size)]
    assert groups[0] == pieces and sum(groups) == 960
    assert all(piece.start % 64 == 0 for group in sub_groups(buckets, size) for piece in group)


def test_a_tied_bucket_is_cut_equally_on_each_of_its_stages() -> None:
    """Sub-groups depended on what came before the bucket on a rank, and so did the last bits of its weights."""

    def cuts(*others: int) -> list[list[tuple[int, int]]]:
        tied: Any = _Range(10, tie=0)
        buckets: Any = [*map(_Range, others), tied, _Range(2)]
        return [
            [(piece.start, piece.stop) for piece in pieces] for pieces in sub_groups(buckets, 4) if pieces[0][0] is tied
        ]

    assert cuts() == cuts(1) == cuts(3, 4) == [[(0, 4)], [(4, 8)], [(8, 10)]]


# ------------------------------------------------------------------------------------------ what is resident

LAYER, LAYERS, SUB_GROUP = 1024, 16, 2**20  # a layer's weights are 4 MiB, a sub-group's numbers 16 MiB


def grown(zero: dict[str, Any]) -> tuple[float, float, dict[str, Any]]:
    """Return MiB at the peak of two steps and after them, beyond those of a process that trained two tiny models.

    Two, because the second is made while the first is still there, as the large one is while the second is: Python's
    own heap, which grows by arenas of 1 MiB, has room for the objects of two engines then.
    """
    with own_pages():
        for width in (8, 8, LAYER):
            growth = Growth()
            layers = [LayerSpec(Layer, width) for _ in range(LAYERS)]
            model = PipelineModule(layers, grid=Grid(), loss_fn=F.mse_loss, device="meta")
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "gradient_clipping": 1.0,
                "zero_optimization": {"sub_group_size": SUB_GROUP, "reduce_bucket_size": LAYER**2, **zero},
            }
            engine, *_ = triax.initialize(model=model, config=config)
            x = torch.ones(1, width)
            for _ in range(2):
                engine.train_batch(iter([(x, x)]))
        peak, after = growth.measure()
        return peak / 2**20, after / 2**20, engine.memory_report()


def test_resident_memory_is_two_sub_groups_and_the_working_layer(ranks: Any, tmp_path: Path) -> None:
    layer, sub_group, everything, disk = 4, 16, LAYERS * 16, nvme(tmp_path)
    [(peak, after, report)] = ranks(1, grown, {"stage": 3}, new_processes=True)
    assert peak > everything and after > everything - 1
    assert report["offloaded"] == {}

    # At work are a layer's weights and gradient, and of its neighbours: the next one's weights, and two gradients
    # that are on their way.
    [(peak, after, report)] = ranks(
        1, grown, {"stage": 3, "offload_optimizer": disk, "offload_param": disk}, new_processes=True
    )
    assert peak < 2 * sub_group + 5 * layer < everything / 4
    assert after < 2
    assert report["held"]["parameters"] == report["held"]["optimizer"] == report["held"]["gradients"] == 0
    numel = LAYERS * (LAYER**2 + LAYER)
    assert report["offloaded"] == {"nvme": {"parameters": 4 * numel, "gradients": 4 * numel, "optimizer": 8 * numel}}

    # With the weights in memory, they come on top.
    [(peak, after, report)] = ranks(1, grown, {"stage": 2, "offload_optimizer": disk}, new_processes=True)
    assert peak < LAYERS * layer + 2 * sub_group + 5 * layer
    assert after < LAYERS * layer + 2
    assert report["held"]["parameters"] == 4 * numel and report["held"]["gradients"] == 0


THIN, ALLOWANCE = 512, 24 * 2**20


def limited(zero: dict[str, Any]) -> str | list[float]:
    """Return losses of a model whose weights are 4 times the memory that this process may allocate, or the error."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    count = 4 * ALLOWANCE // (4 * THIN**2)
    with own_pages():
        try:
            for width in (8, THIN):
                if width == THIN:
                    rest()
                    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + ALLOWANCE, before[1]))
                model = PipelineModule([LayerSpec(Layer, width)] * count, loss_fn=F.mse_loss, device="meta")
                config = {
                    "train_micro_batch_size_per_gpu": 1,
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                    "zero_optimization": {"stage": 3, "sub_group_size": THIN**2, "reduce_bucket_size": THIN**2, **zero},
                }
                engine, *_ = triax.initialize(model=model, config=config)
                x = torch.linspace(-1, 1, width)[None]
                losses = [engine.train_batch(iter([(x, x)])).item() for _ in range(2)]
            return losses
        except RuntimeError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def test_weights_of_4_times_the_allowed_memory_train_from_disk(ranks: Any, tmp_path: Path) -> None:
    disk = nvme(tmp_path)
    [losses] = ranks(1, limited, {"offload_optimizer": disk, "offload_param": disk})
    assert losses[1] < losses[0]
    [said] = ranks(1, limited, {"offload_optimizer": disk})
    assert "memory" in said


# ------------------------------------------------------------------------------------------ errors


def refused(zero: dict[str, Any], victim: int, limit: int | None) -> str:
    """Return the error of initialize, on a rank whose folder is missing or whose file size is limited."""
    grid = Grid(data=2, timeout=60)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if grid.rank == victim and limit is None:
        zero = {**zero, "offload_optimizer": nvme(Path("missing"))}
    if grid.rank == victim and limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        engine_of(grid, zero)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "nothing"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_room_to_offload_stops_all_ranks(ranks: Any, victim: int, tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": nvme(tmp_path)}
    said = ranks(2, refused, zero, victim, limit=None)
    assert said[0] == said[1] and f"rank {victim}" in said[0]
    assert "nothing can be offloaded to missing: No such file or directory; set nvme_path" in said[0]
    said = ranks(2, refused, zero, victim, 8192)
    assert said[0] == said[1] and f"rank {victim}" in said[0]
    assert f"{tmp_path} has no room" in said[0] and "needs 4.1e-06 GB more" in said[0] and "File too large" in said[0]


def test_the_offload_keys_of_deepspeed_are_read() -> None:
    disk = nvme(Path("."))

    def zero(**keys: Any) -> Any:
        return read_config({"train_batch_size": 1, "zero_optimization": keys}).zero_optimization

    def notes_on(**keys: Any) -> list[str]:
        notes = notes_of(read_config({"train_batch_size": 1, "zero_optimization": keys}))
        return [note.removeprefix("zero_optimization.") for note in notes]

    assert zero(stage=3, sub_group_size=1e9).sub_group_size == 10**9
    assert zero(offload_optimizer={"device": "cpu", "ratio": 1.0, "pipeline_read": False}).offload_optimizer
    assert zero(offload_optimizer=None).offload_optimizer.device == "none"
    [note] = notes_on(offload_param={"device": "cpu"}, stage=2)
    assert "does nothing in stage 2, where weights are whole: set stage 3" in note
    # DeepSpeed's buffers: accepted, with the reason why they do nothing.
    buffers = {**disk, "pin_memory": True, "buffer_count": 4, "fast_init": False, "ratio": 0.3}
    notes = notes_on(offload_optimizer=buffers, offload_param={**disk, "buffer_size": 1e8, "max_in_cpu": 1e9}, stage=3)
    for key, reason in {
        "offload_optimizer.buffer_count": "files are memory-mapped",
        "offload_optimizer.pin_memory": "pages of a file cannot be pinned",
        "offload_optimizer.fast_init": "state is created in the first step",
        "offload_optimizer.ratio": "all optimizer state is offloaded",
        "offload_param.buffer_size": "files are memory-mapped",
        "offload_param.max_in_cpu": "files are memory-mapped",
    }.items():
        assert any(note.startswith(f"{key} does nothing") and reason in note for note in notes), key
    assert zero(stage=3, max_live_parameters=7).stage3_max_live_parameters == 7  # DeepSpeed takes it without the prefix
    cases: list[tuple[dict[str, Any], str]] = [
        ({"offload_optimizer": {"device": "nvme"}}, "device nvme needs nvme_path"),
        ({"max_live_parameters": 1, "stage3_max_live_parameters": 2}, "another name of stage3_max_live_parameters"),
        ({"offload_optimizer": {"device": "disk"}}, "offload_optimizer.device = 'disk'"),
        ({"offload_optimizer": {"devise": "cpu"}}, "did you mean 'device'"),
        ({"sub_group_size": 0}, "sub_group_size"),
    ]
    for keys, message in cases:
        assert message in error_text(partial(zero, **keys), ConfigError)


def test_offload_takes_an_optimizer_that_makes_state_at_once() -> None:
    made = []
    offload: dict[str, Any] = {"offload_optimizer": OffloadOptimizer(device="cpu"), "sub_group_size": 17}
    for zero in (triax.Zero(stage=1), triax.Zero(stage=1, **offload)):
        grid = Grid()
        torch.manual_seed(0)
        model = PipelineModule([LayerSpec(Layer, WIDTH)] * 2, grid=grid, loss_fn=squares, dtype=torch.float64)
        batch = triax.Batch(size=SAMPLES, microbatch=2)
        engine = pipeline_engine(model, batch, optimizer=StartsWithState, zero=zero)
        made.append(train(engine, batches(grid), 3)[-1].weights)
    torch.testing.assert_close(*made, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_each_offloaded_tensor_counts_at_its_place_alone(tmp_path: Path, stage: Any, device: str) -> None:
    """Micikevicius et al. 2018 and ZeRO, section 3.1: 2 bytes of weights; in fp32 a master, a gradient and 2 moments.

    Stage 1 keeps whole gradients on the device; stages 2 and 3 offload their shards too.
    """
    model, numel = nn.Linear(16, 16, bias=False), 256
    place: Any = {"device": device, "path": str(tmp_path) if device == "nvme" else None}
    engine = triax.Engine(
        model,
        optimizer=triax.Optimizer("AdamW", lr=0.1),
        batch=triax.Batch(size=2),
        precision="bf16",
        zero=triax.Zero(stage=stage, offload_optimizer=place),
    )
    engine.backward(engine(torch.ones(2, 16, dtype=torch.bfloat16)).float().sum())
    engine.step()
    sizes = {"gradients": 4 * numel, "masters": 4 * numel, "optimizer": 8 * numel}
    moved = [] if device == "none" else ["masters", "optimizer", *(["gradients"] if stage > 1 else [])]
    report = engine.memory_report()
    assert report["offloaded"] == ({device: {kind: sizes[kind] for kind in moved}} if moved else {})
    held = {kind: 0 if kind in moved else size for kind, size in sizes.items()}
    assert {kind: report["held"][kind] for kind in held} == held
    assert report["held"]["parameters"] == 2 * numel
