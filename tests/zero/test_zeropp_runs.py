"""Training with ZeRO++: on other grids, in a plain loop, after overflows and checkpoints, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.base.errors import ConfigError
from triax.compat.deepspeed.config.to_options import notes_of
from triax.compat.deepspeed.from_config import read_config
from triax.zero import ShardedOptimizer, gathered
from triax.zero.zeropp.options import ZeroPlusPlus

from support.quantized_layers import ALL, HPZ, PLAIN, QGZ, QWZ, WIDTH, Layer, made
from support.training import small_config, tiny_gpt


def overflowing() -> Any:
    """Steps in fp16, in one of which a replica has infinite gradients for elements that the other one owns."""
    grid = Grid(timeout=60)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False)]
    model = PipelineModule(layers, grid=grid, loss_fn=lambda o, y: (o - y).float().square().mean())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "zero_optimization": {"stage": 2, QGZ: True},
    }
    engine, *_ = triax.initialize(model=model, config=config)
    found = []
    for size in (1.0, 1e5, 1.0):
        labels = torch.ones(1, WIDTH)
        labels[0, 0] = size if grid.data.is_last else 1.0  # the weight's first row
        before = engine.gather()
        engine.train_batch(iter([(torch.ones(1, WIDTH), labels)]))
        same = all(torch.equal(before[k], now) for k, now in engine.gather().items())
        found.append((same, engine.loss_scale()))
    return found


def test_an_overflow_skips_the_step_on_every_rank(ranks: Any) -> None:
    assert ranks(2, overflowing) == [[(False, 256.0), (True, 128.0), (False, 128.0)]] * 2


def learned(shape: tuple[int, int, int], steps: int, zero: dict[str, Any]) -> tuple[float, float, Any]:
    """Return the losses of a small GPT's first and last steps, and the bytes sent."""
    grid = Grid(*shape, timeout=60)
    sizes: dict[str, Any] = {"vocab_size": 32, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 2}
    model = tiny_gpt(grid, dtype=torch.float32, **sizes)
    config = small_config("AdamW", lr=5e-3, micro=4, zero=zero, bf16={"enabled": True})
    engine, *_ = triax.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(grid.data.rank)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            ids = torch.randint(32, (4, 1), generator=generator)
            ids = (ids + 3 * torch.arange(17)) % 32  # counting by threes
            yield ids[:, :-1], ids[:, 1:]

    losses = [float(engine.train_batch(batches())) for _ in range(steps)]
    return losses[0], losses[-1], engine.traffic_report()


@pytest.mark.exhaustive  # each step's numbers are those of the equations in test_zeropp.py
@pytest.mark.parametrize(("replicas", "host"), [(2, 1), (4, 2)])
def test_zeropp_reaches_the_loss_of_training_without_it(ranks: Any, replicas: int, host: int) -> None:
    """50 steps of a small GPT in bf16: the same loss to a few percent, for a third of the bytes and less."""
    first, plain, before = ranks(replicas, learned, (1, replicas, 1), 50, PLAIN)[0]
    _, quantised, after = ranks(replicas, learned, (1, replicas, 1), 50, {**ALL, HPZ: host})[0]
    assert plain < 0.2 * first
    assert quantised == pytest.approx(plain, rel=0.05, abs=0.02)
    sent = [
        sum(k["bytes"] for a in report["sent"] if "data" in a for k in report["sent"][a].values())
        for report in (before, after)
    ]
    assert sent[1] < sent[0] / 3


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)])
def test_zeropp_has_similar_losses_on_pipe_and_tensor_axes(ranks: Any, shape: tuple[int, int, int]) -> None:
    plain = ranks(4, learned, shape, 3, PLAIN)
    for one, other in zip(plain, ranks(4, learned, shape, 3, {**ALL, HPZ: 2}), strict=True):
        assert other[1] != one[1] and other[1] == pytest.approx(one[1], rel=0.02)
        assert other[0] == pytest.approx(one[0], rel=0.01)
        assert other[2]["uncompressed"] == one[2]["formula"]


class Sometimes(Layer):
    """A model with a part that some replicas do not use."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.other, self._used = nn.Linear(WIDTH, WIDTH), used

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.other(y) if self._used else y


def looped(plus: dict[str, Any]) -> dict[str, Tensor]:
    """A plain loop that reads and writes weights between passes, with gradients that not every replica has."""
    grid = Grid(timeout=60)
    torch.manual_seed(0)
    model = nn.Sequential(*(Sometimes(used=(grid.data.rank >> i) % 2 == 0) for i in range(3)))
    optimizer = ShardedOptimizer(torch.optim.SGD, model.parameters(), grid, stage=3, module=model, lr=0.1, **plus)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(grid.data.rank))
    found = {}
    for step in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step < 2 or grid.data.is_first:
            loss.backward()
        optimizer.synchronize()
        model(x)  # keeps what is to be stepped
        optimizer.step()
        found[f"after step {step}"] = model(x).detach()  # what was kept is old
        with gathered(model, modifier_rank=1), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        found[f"written {step}"] = model(x).detach()
    with gathered(model):
        found |= {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return found


def reloaded(folder: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a plain module's outputs at first, after a step, and after the first state is loaded again."""
    grid = Grid(timeout=60)
    torch.manual_seed(0)
    config = small_config("AdamW", micro=4, zero={"stage": 3, HPZ: 2})
    engine, *_ = triax.initialize(model=nn.Sequential(Layer(), Layer()), config=config, grid=grid)
    engine.save_checkpoint(folder)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    first = engine(x)
    engine.backward(first.square().mean())
    engine.step()
    moved = engine(x)  # keeps what a checkpoint replaces
    engine.load_checkpoint(folder)
    return first.detach(), moved.detach(), engine(x).detach()


def test_secondary_shards_are_replaced_by_a_loaded_checkpoint(ranks: Any, tmp_path: Any) -> None:
    for first, moved, again in ranks(2, reloaded, str(tmp_path)):
        assert torch.equal(first, again) and not torch.equal(first, moved)


def test_zeropp_trains_in_a_plain_loop(ranks: Any) -> None:
    plain = ranks(4, looped, {})
    for mine, theirs in zip(ranks(4, looped, {"hpz_partition_size": 2}), plain, strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    rounded = {"quantized_weights": True, "quantized_gradients": True, "hpz_partition_size": 2}
    for mine, theirs in zip(ranks(4, looped, rounded), plain, strict=True):
        assert any(not torch.equal(mine[k], theirs[k]) for k in mine)
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02)


def refusing(options: dict[str, Any]) -> str:
    grid = Grid(timeout=60)
    model = Layer()
    with pytest.raises(ValueError) as error:
        ShardedOptimizer(torch.optim.SGD, model.parameters(), grid, module=model, lr=0.1, **options)
    return str(error.value)


def config_of(zero: dict[str, Any], **more: Any) -> Any:
    return read_config({"train_batch_size": 1, "zero_optimization": zero, **more})


def test_contradicting_zeropp_keys_are_refused() -> None:
    for zero, more, words in (
        ({"stage": 2, QGZ: True, "reduce_scatter": False}, {}, "reduce_scatter is false, but quantized"),
        ({"stage": 2, QGZ: True}, {"communication_data_type": "bf16"}, "sends gradients in 4 bits"),
        ({"stage": 3, HPZ: 2, "offload_param": {"device": "cpu"}}, {}, "a second shard of the weights"),
        ({"stage": 3, HPZ: 0}, {}, "zero_hpz_partition_size = 0: give 1 or more"),
        ({"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}, {}, "have no error feedback"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(zero, **more)
    with pytest.raises(ValueError, match="another dtype or compression"):
        ZeroPlusPlus(gradients=True).replace_reductions([], Grid(), plain=False)


def test_zeropp_keys_without_effect_get_a_note(caplog: pytest.LogCaptureFixture) -> None:
    notes = notes_of(config_of({"stage": 3, HPZ: 2, "stage3_keep_gathered": True}))
    assert "zero_optimization.zero_hpz_partition_size keeps no second shard: stage3_keep_gathered" in " ".join(notes)
    notes = notes_of(config_of({"stage": 2, HPZ: 2, QWZ: True, QGZ: True}))
    assert len(notes) == 2 and all("acts in stage 3, not in stage 2" in note and QGZ not in note for note in notes)
    assert not notes_of(config_of({**ALL, HPZ: 2}))
    with caplog.at_level(logging.WARNING, logger="triax"):
        one = made(Grid(), {**ALL, HPZ: 8})  # one replica: nothing is sent
    assert one.data_axis.options.zeropp is None
    (record,) = caplog.records
    assert "zero_hpz_partition_size 8 does nothing on one replica" in record.getMessage()


def test_sharded_optimizer_refuses_contradicting_zeropp_options(ranks: Any) -> None:
    for options, words in (
        ({"stage": 1, "quantized_weights": True}, "in stage 1 they are whole"),
        ({"stage": 0, "quantized_gradients": True}, "stage 0 shards nothing"),
        ({"stage": 2, "quantized_gradients": True, "communication_dtype": torch.bfloat16}, "give one"),
        ({"stage": 3, "hpz_partition_size": 2, "keep_gathered": True}, "gathers weights once a step"),
        ({"stage": 3, "hpz_partition_size": 3}, "2 replicas do not fall into groups of 3: give one of 1, 2"),
    ):
        assert all(words in said for said in ranks(2, refusing, options))
