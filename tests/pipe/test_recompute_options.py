"""Options of recomputation: which layers it takes, what contradicts, what is kept."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.pipe.recompute.kept_inputs import Inputs
from triax.pipe.recompute.recompute import shares

from support.recompute_layers import Counts, counting, runs


def groups_of(model: PipelineModule) -> dict[range, bool]:
    """The groups of layers that run together, and True for those that are recomputed."""
    return {range(group.start, group.stop): group.recomputed for group in model.recompute.groups(model, 0)}


def test_recomputed_groups_of_layers_follow_the_interval() -> None:
    assert groups_of(counting(interval=2)) == {range(2): True, range(2, 4): True, range(4, 5): True}
    assert groups_of(counting(interval=0)) == {range(5): False}
    with pytest.raises(ValueError, match="interval=-1: give a whole number of at least 0"):
        counting(interval=-1)


def test_recomputed_groups_have_checkpointable_layers_only() -> None:
    counts = LayerSpec(Counts, 2)
    layers: list[Any] = [LayerSpec(nn.Linear, 2, 2), counts, counts, torch.relu, counts]
    model = PipelineModule(layers, grid=Grid(), activation_checkpoint_interval=5, checkpointable_layers=["Counts"])
    assert groups_of(model) == {range(1): False, range(1, 3): True, range(3, 4): False, range(4, 5): True}
    names = [group.name for group in model.recompute.groups(model, 0)]
    assert names == ["layer 0", "layers 1 to 2", "layer 3", "layer 4"]


def test_longer_runs_of_layers_get_more_groups() -> None:
    assert shares(lengths=[6, 3], number=4) == [3, 1]
    assert shares(lengths=[2, 2], number=1) == [1, 1]  # each run is at least one group
    assert shares(lengths=[2, 1], number=9) == [2, 1]  # and a group at least one layer


def saved_storages(model: PipelineModule, x: Tensor) -> tuple[Tensor, list[weakref.ref[torch.UntypedStorage]]]:
    """Run a model; return its output, and the memory of what autograd has saved for the backward pass."""
    saved: list[weakref.ref[torch.UntypedStorage]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return model(x), saved


def test_kept_inputs_are_in_slots_of_one_buffer() -> None:
    model = counting(interval=2)  # layers 0 and 1, 2 and 3, 4
    model.recompute.inputs = Inputs(model.grid, slots=3)
    y, saved = saved_storages(model, torch.randn(3, 4, requires_grad=True))
    buffers = {id(storage): storage.nbytes() for each in saved if (storage := each()) is not None}
    assert list(buffers.values()) == [3 * 64]  # an input is 3 x 4 floats of 4 bytes, 48 rounded up to 64
    del y


def test_backward_frees_kept_inputs_without_the_collector() -> None:
    model = counting(interval=2)
    model.recompute.inputs = Inputs(model.grid, slots=3)
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        y, kept = saved_storages(model, x)
        kept.append(weakref.ref(y.untyped_storage()))
        assert len(kept) == 4 and all(storage() is not None for storage in kept)
        y.sum().backward()
        del y
        assert [storage() for storage in kept] == [None] * 4
    finally:
        gc.enable()


def test_a_layer_that_recomputes_differently_is_refused() -> None:
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x).exp() if self.calls == 1 else super().forward(x[:1])

    model = PipelineModule([Moody(3, 3)], grid=Grid(), activation_checkpoint_interval=1)
    with pytest.raises(RuntimeError, match=r"layer 0 did something else when computed again: of the .* number 0 was"):
        model(torch.randn(2, 3)).sum().backward()

    class Shorter(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x).exp() if self.calls == 1 else super().forward(x)

    model = PipelineModule([Shorter(3, 3)], grid=Grid(), activation_checkpoint_interval=1)
    with pytest.raises(RuntimeError, match="and is missing"):
        model(torch.randn(2, 3)).sum().backward()


class Core(nn.Module):
    """A layer with a part that asks to be recomputed."""

    recompute: Any = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.record = SimpleNamespace(runs=0)

    def core(self, a: Tensor, b: Tensor, sharp: float) -> Tensor:
        self.record.runs += 1
        weights = torch.softmax(a @ b.T * sharp, -1)
        return torch.nn.functional.dropout(weights, 0.2) @ b

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inward(x).chunk(2, -1)
        y = self.core(a, b, sharp=0.5) if self.recompute is None else self.recompute(self.core, a, b, sharp=0.5)
        result: Tensor = x + self.outward(y)
        return result


def selective(granularity: str | None) -> tuple[list[Tensor], int, list[int]]:
    model = PipelineModule([LayerSpec(Core, 4) for _ in range(3)], grid=Grid(), loss_fn=lambda y, _: y.square().sum())
    section = {"granularity": granularity}
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = triax.initialize(model=model, config={**config, "activation_checkpointing": section})
    engine.record_memory = True
    torch.manual_seed(2)
    x = torch.randn(8, 4)
    engine.train_batch(iter([(x, None)]))
    counts = runs(model)
    return list(engine.gather("gradients").values()), engine.memory_report()["held"]["activations"], counts


def test_selective_recomputes_parts_with_a_recompute_attribute() -> None:
    wanted, held, once = selective(None)
    found, less, twice = selective("selective")
    assert all(map(torch.equal, found, wanted)) and once == [1] * 3 and twice == [2] * 3
    # Each core saves 8 x 8 numbers three times over: the softmax, dropout's mask, and what dropout returns.
    assert held - less == 3 * 3 * 64 * 4
    with pytest.raises(ConfigError, match="no module of the model has a class attribute recompute"):
        configured({"granularity": "selective"})


def configured(section: dict[str, Any], interval: int = 0, grid: Grid | None = None, layers: int = 4) -> Any:
    model = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4) for _ in range(layers)],
        grid=grid or Grid(),
        loss_fn=lambda y, _: y.square().sum(),
        activation_checkpoint_interval=interval,
    )
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = triax.initialize(model=model, config={**config, "activation_checkpointing": section})
    return engine


@pytest.mark.parametrize(
    ("section", "interval", "message"),
    [
        ({"contiguous_memory_optimization": True}, 0, "set partition_activations to true, and give number_checkpoints"),
        ({"interval": 2, "number_checkpoints": 2}, 0, "interval 2 and number_checkpoints 2 both set"),
        (
            {"number_checkpoints": 2},
            3,
            "number_checkpoints 2 was given, but the model has activation_checkpoint_interval=3",
        ),
        ({"enabled": False}, 3, "enabled false was given, but the model has activation_checkpoint_interval=3"),
        ({"enabled": True, "interval": 0}, 0, "enabled is true, but interval 0 recomputes nothing"),
        ({"interval": 2}, 3, "interval 2 was given, but the model has activation_checkpoint_interval=3"),
        ({"granularity": "selective"}, 3, "granularity selective was given, but the model has"),
        ({"granularity": "selective", "interval": 1}, 0, "leave out interval and number_checkpoints"),
        (
            {"interval": 1, "checkpointable_layers": ["GPTBlock"]},
            0,
            "no layer of the model is a GPTBlock; there are Linear",
        ),
        ({"intervall": 1}, 0, "did you mean 'interval'"),
    ],
)
def test_recompute_options_that_contradict_are_refused(section: dict[str, Any], interval: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(section, interval)


@pytest.mark.parametrize(
    ("section", "note"),
    [
        (
            {"cpu_checkpointing": True, "interval": 0, "profile": True},
            "cpu_checkpointing, profile: nothing is recomputed; set interval",
        ),
        ({"interval": 1, "partition_activations": True}, "the tensor axis has one rank"),
        ({"interval": 1, "cpu_checkpointing": True}, "the model is in the host's memory"),
        ({"number_checkpoints": 9}, "a rank with 1 stages of 4 layers has at least 1 groups and at most 4"),
    ],
)
def test_triax_warns_of_recompute_options_without_effect(
    caplog: pytest.LogCaptureFixture, section: dict[str, Any], note: str
) -> None:
    with caplog.at_level(logging.WARNING, "triax"):
        configured(section)
    assert note in caplog.text


def test_each_key_recomputes_its_groups_of_layers() -> None:
    def groups(section: dict[str, Any], interval: int = 0) -> list[int]:
        module = configured(section, interval).module
        return [group.stop - group.start for group in module.recompute.groups(module, 0) if group.recomputed]

    assert groups({}) == [] and groups({}, 3) == [3, 1] and groups({"interval": 3}) == [3, 1]
    assert groups({"interval": 0}) == [] and groups({"number_checkpoints": 3}) == [1, 1, 2]
    assert groups({"granularity": "full"}) == groups({"granularity": "matmul"}) == [1] * 4
    for asks in ("enabled", "partition_activations", "cpu_checkpointing"):
        assert groups({asks: True}) == [1] * 4 and groups({asks: True}, 3) == groups({asks: True, "interval": 3})
        assert groups({asks: True, "number_checkpoints": 2}) == [2, 2]
    assert groups({"enabled": False, "interval": 1, "cpu_checkpointing": True}) == []
    assert groups({"granularity": "matmul", "interval": 2}) == groups({"granularity": "matmul"}, 2) == [2, 2]


def test_the_recompute_profile_logs_times(caplog: pytest.LogCaptureFixture) -> None:
    engine = configured({"interval": 1, "profile": True, "synchronize_checkpoint_boundary": True})
    with caplog.at_level(logging.WARNING, "triax"):
        engine.train_batch(iter([(torch.randn(2, 4), None)]))
    assert "4 recomputations took" in caplog.text and "ms of this step" in caplog.text
