"""Random numbers are functions of their keys, never of the grid or of earlier draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from triax.base.seeds import derive
from triax.grid.comm.axis import Axis
from triax.grid.layout import Layout
from triax.grid.randomness.random import (
    Constant,
    Distribution,
    Dropout,
    DropoutState,
    Normal,
    Uniform,
    initialize,
    seeded,
    sharded_parameter,
)
from triax.models.gpt import GPTConfig, gpt_layers
from triax.pipe.module import PipelineModule
from triax.pipe.spec import LayerSpec


def test_derive_is_pinned_and_tells_keys_apart() -> None:
    # Its value is part of every run that anyone wants to repeat: changing it must be a decision.
    assert derive(0, "layers.0") == 6693686959509291029
    keys: list[tuple[int | str, ...]] = [
        (0,),
        (1,),
        ("0",),
        (0, 1),
        (1, 0),
        (0, "1"),
        ("a", "b"),
        ("ab",),
        ("a", "b", 0),
    ]
    assert len({derive(*key) for key in keys}) == len(keys)
    assert all(0 <= derive(i) < 2**63 for i in range(100))


def test_seeded_restores_the_generator_and_repeats_its_draws() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with seeded(1, "a"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(2), expected)
    with seeded(1, "a"):
        assert torch.equal(torch.rand(3), first)
    with seeded(1, "b"):
        assert not torch.equal(torch.rand(3), first)


# ------------------------------------------------------------------------------------------- initial values


def draw(layout: Layout, rank: int, size: int, init: Distribution, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(3)
    part = torch.full(layout.local_shape(rank, size), torch.nan, dtype=dtype)
    initialize(part, layout, rank, size, init)
    return part


@settings(max_examples=40)
@given(
    st.sampled_from([(7,), (9, 5), (300, 500), (40, 3, 700), (3, 70000)]),  # also over the blocks' borders
    st.data(),
    st.integers(1, 5),
)
def test_a_shard_is_bitwise_its_part_of_the_whole(shape: tuple[int, ...], data: st.DataObject, size: int) -> None:
    shard_dim = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[shard_dim]))
    parts = data.draw(st.sampled_from([None, (first, shape[shard_dim] - first)]))
    unit = data.draw(st.sampled_from([1, math.gcd(first, shape[shard_dim]) if parts else shape[shard_dim]]))
    layout = Layout(shape, shard_dim=shard_dim, parts=parts, unit=unit)
    whole = draw(layout, 0, 1, Normal(1.0))
    shards = [draw(layout, rank, size, Normal(1.0)) for rank in range(size)]
    assert torch.equal(layout.assemble(shards), whole)


def test_initializing_a_shard_draws_one_number_at_any_size() -> None:
    layout = Layout((64, 100), shard_dim=0)
    following = set()
    for rank, size in ((0, 1), (1, 2), (3, 4)):
        draw(layout, rank, size, Uniform(1.0))
        following.add(float(torch.rand(())))
    torch.manual_seed(3)
    initialize(torch.empty(64, 100, device="meta"), layout, 0, 1, Uniform(1.0))
    following.add(float(torch.rand(())))
    assert len(following) == 1


def test_a_constant_fills_every_shard() -> None:
    layout = Layout((7, 5), shard_dim=0, parts=(4, 3))
    following = set()
    for init in (Constant(2.5), Normal(1.0)):
        for rank in range(3):
            torch.manual_seed(3)
            part = sharded_parameter(layout, init, rank, 3, dtype=torch.float64)
            following.add(float(torch.rand(())))
            assert part.shape == layout.local_shape(rank, 3) and part.requires_grad
            assert init != Constant(2.5) or torch.equal(part, torch.full_like(part, 2.5))
    assert len(following) == 1


class Truncated:
    """Normal values between -1 and 1: a distribution of a user's own."""

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return nn.init.trunc_normal_(torch.empty(shape), a=-1.0, b=1.0, generator=generator)


def test_a_user_distribution_is_sharded_bitwise_as_the_whole() -> None:
    layout = Layout((300, 500), shard_dim=1)
    whole = draw(layout, 0, 1, Truncated())
    assert 0.99 < float(whole.abs().max()) <= 1.0
    assert torch.equal(layout.assemble([draw(layout, rank, 3, Truncated()) for rank in range(3)]), whole)


def test_initial_values_have_their_distribution_and_no_repeats() -> None:
    layout = Layout((1000, 1000))
    normal, uniform = draw(layout, 0, 1, Normal(0.02)), draw(layout, 0, 1, Uniform(0.5))
    assert abs(float(normal.mean())) < 5 * 0.02 / 1000
    assert abs(float(normal.std()) / 0.02 - 1) < 0.005
    assert -0.5 <= float(uniform.min()) < -0.499 and 0.499 < float(uniform.max()) < 0.5
    assert abs(float(uniform.std()) - 1 / math.sqrt(12)) < 0.002
    # Blocks have keys of their own: no row comes twice.
    assert len(torch.unique(normal[:, 0])) > 990


def test_float64_and_bfloat16_are_roundings_of_the_same_values() -> None:
    layout = Layout((30, 40), shard_dim=1)
    single = draw(layout, 1, 2, Normal(1.0))
    assert torch.equal(draw(layout, 1, 2, Normal(1.0), torch.float64), single.double())
    assert torch.equal(draw(layout, 1, 2, Normal(1.0), torch.bfloat16), single.bfloat16())


# -------------------------------------------------------------------------------------------------- dropout


def mask(samples: range, p: float = 0.5, seed: int = 0, step: int = 0, layer: str = "l", width: int = 50) -> Tensor:
    dropout, state = Dropout(p), DropoutState(seed)
    state.step, state.samples = step, samples
    dropout.bind(layer, state)
    out: Tensor = dropout(torch.ones(len(samples), 4, width))
    return out


def test_dropout_does_not_depend_on_how_the_batch_is_cut() -> None:
    whole = mask(range(8))
    for size in (1, 2, 4):
        cut = [mask(range(first, first + size)) for first in range(0, 8, size)]
        assert torch.equal(torch.cat(cut), whole)
    strided = mask(range(1, 8, 2))  # a replica that takes every other sample
    assert torch.equal(strided, whole[1::2])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_dropout_of_a_sequence_shard_is_a_part_of_the_whole(size: int) -> None:
    x, state = torch.ones(3, 8, 5), DropoutState(seed=4)
    state.samples = range(6, 9)

    def dropped(axis: Axis | None, x: Tensor) -> Tensor:
        dropout = Dropout(0.5, axis)
        dropout.bind("l", state)
        y: Tensor = dropout(x)
        return y

    axes = [Axis("tensor", range(size), rank, None) for rank in range(size)]
    shards = [dropped(axis, part) for axis, part in zip(axes, x.chunk(size, dim=1), strict=True)]
    assert torch.equal(torch.cat(shards, dim=1), dropped(None, x))


def test_dropout_changes_with_each_part_of_its_key() -> None:
    base = mask(range(8))
    others = [mask(range(8), seed=1), mask(range(8), step=1), mask(range(8), layer="m"), mask(range(8, 16))]
    masks = [base, *others]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            # Half of the elements agree by chance: 1600 of them, so within 5 standard deviations of 1/80.
            assert abs(float(((a == 0) == (b == 0)).double().mean()) - 0.5) < 5 / 80


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_meets_its_rate_and_keeps_the_mean(p: float) -> None:
    x = mask(range(100), p=p, width=1000)
    count = x.numel()
    assert abs(float((x == 0).double().mean()) - p) < 5 * math.sqrt(p * (1 - p) / count)
    assert set(x.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1.0 - p))}
    # Neighbours, along elements and along samples, are independent.
    dropped = (x == 0).double().view(100, -1)
    for a, b in ((dropped[:, :-1], dropped[:, 1:]), (dropped[:-1], dropped[1:])):
        covariance = float((a * b).mean() - a.mean() * b.mean())
        assert abs(covariance) < 5 * p * (1 - p) / math.sqrt(count)


def test_dropout_is_the_identity_in_evaluation_and_at_0() -> None:
    x = torch.randn(2, 3)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_dropout_scales_the_gradient_as_the_value() -> None:
    x = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    y = Dropout(0.3)(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad * x, y) and y.dtype == torch.float64


def test_dropout_refuses_wrong_probabilities_and_samples() -> None:
    for p in (-0.1, 1.0, 2.0):
        with pytest.raises(ValueError, match="at least 0 and less than 1"):
            Dropout(p)
    dropout, state = Dropout(0.1), DropoutState()
    state.samples = range(4)
    dropout.bind("layers.2.dropout", state)
    with pytest.raises(ValueError, match=r"the Dropout layers\.2\.dropout has 3 rows on dim 0, .* 4 samples"):
        dropout(torch.ones(3, 2))


# ------------------------------------------------------------------------- dropout in a loop without an engine


class Again(nn.Module):
    """Dropout behind a layer, run by torch.utils.checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.line, self.drop, self.reentrant = nn.Linear(6, 6), Dropout(0.5), reentrant

    def part(self, x: Tensor) -> Tensor:
        return self.drop(self.line(x)).sin()

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


def looped(reentrant: bool | None = None, interval: int = 0, whole: bool = False, seed: int = 0) -> list[Tensor]:
    """Outputs and gradients of a plain loop: of two steps, and of two forwards with one backward."""
    layers = [LayerSpec(Again, reentrant), LayerSpec(nn.Linear, 6, 6), LayerSpec(Again, reentrant)]
    model = PipelineModule(layers, seed=seed, dtype=torch.float64, activation_checkpoint_interval=interval).train()
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6).requires_grad_()

    def run() -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False) if whole else model(x)
        return y

    found = []
    for forwards in (1, 1, 2):
        ys = [run() for _ in range(forwards)]
        model.zero_grad()
        sum(y.square().sum() for y in ys).backward()  # type: ignore[union-attr]
        found += [y.detach() for y in ys]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def test_each_forward_pass_of_a_plain_loop_has_a_new_dropout_mask() -> None:
    model = PipelineModule(gpt_layers(GPTConfig.preset("bytes-tiny", dropout=0.3))).train()
    x = torch.arange(8).view(1, 8)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    again = PipelineModule(gpt_layers(GPTConfig.preset("bytes-tiny", dropout=0.3))).train()
    assert torch.equal(again(x), first) and torch.equal(again(x), second)  # a run can be repeated
    model.dropout_state.step = 0  # and by the step, as the engine sets it
    assert torch.equal(model(x), first) and torch.equal(model(x), second)
    model.eval()
    assert torch.equal(model(x), model(x)) and model.dropout_state.step == 1


@pytest.mark.parametrize(
    "how", [{"reentrant": False}, {"reentrant": True}, {"interval": 1}, {"whole": True}, {"interval": 2, "whole": True}]
)
def test_recomputation_in_a_plain_loop_has_equal_dropout_masks(how: dict[str, Any]) -> None:
    wanted, found = looped(), looped(**how)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert not torch.equal(wanted[0], looped(seed=1)[0])
