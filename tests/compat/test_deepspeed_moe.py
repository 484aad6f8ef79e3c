"""DeepSpeed's MoE layer, on one rank and with experts over two: against plain PyTorch in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triax
import triax.compat.deepspeed as deepspeed
from triax.compat.deepspeed.moe import DeepSpeedMoE as MoE
from triax.grid.auxiliary import AuxiliaryLayer
from triax.grid.randomness.random import DropoutState
from triax.moe.router import GateNoise

D, E = 6, 4


class Model(nn.Module):
    def __init__(self, ep_size: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        expert = nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Linear(8, D))
        self.first, self.moe = nn.Linear(D, D), MoE(D, expert, E, ep_size, **options)
        generator = torch.Generator().manual_seed(5)
        first = self.moe.grid.expert.rank * (E // ep_size)
        with torch.no_grad():  # copies that differ, and a router that does not draw
            self.moe.gate.weight.copy_(torch.randn(E, D, generator=generator))
            for name in self.moe.experts._names:
                stacked = getattr(self.moe.experts, name.replace(".", "_"))
                noise = torch.randn(E, *stacked.shape[1:], generator=generator)
                stacked.add_(noise[first : first + len(stacked)], alpha=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y, loss, self.counts = self.moe(self.first(x))
        return y.square().mean() + 0.1 * loss


def rows(number: int) -> Tensor:
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(number))


def train(ep_size: int, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        model = Model(ep_size, **options)
        config = {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        ranks = range(2) if ep_size == 1 else [engine.grid.rank]
        for number in ranks:
            loss = engine(rows(number))
            engine.backward(loss)
            engine.step()
        return {**engine.gather("gradients"), "counts": model.counts}
    finally:
        torch.set_default_dtype(torch.float32)


def plain(options: dict[str, Any]) -> dict[str, Tensor]:
    """The mean over the two microbatches of the loss, with a loop over tokens."""
    torch.set_default_dtype(torch.float64)
    model = Model(1, **options)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    k, total = options.get("k", 1), torch.zeros(())
    noise, state = GateNoise(options.get("noisy_gate_policy", "").lower().replace("rsample", "gumbel")), DropoutState()
    noise.bind("moe.gate.noise", state)
    for number in range(2):
        x = F.linear(rows(number), weights["first.weight"], weights["first.bias"])
        state.samples = range(2 * number, 2 * number + 2)
        logits = F.linear(x * noise(x) if noise.kind == "jitter" else x, weights["moe.gate.weight"])
        shares, order = logits.softmax(-1), logits + noise(logits) if noise.kind == "gumbel" else logits
        y, taken, firsts = torch.zeros_like(x), torch.zeros(2, E), torch.zeros(E)
        capacity = max(-(-k * 5 // E), 1) if options.get("drop_tokens", True) else 99
        for b in range(2):
            for t in range(5):
                best = order[b, t].detach().argsort(descending=True)[:k]
                firsts[best[0]] += 1
                scale = shares[b, t, best].sum() if k > 1 else 1.0
                for e in best.tolist():
                    if taken[b, e] < capacity:
                        taken[b, e] += 1
                        up, up_b, down, down_b = (
                            weights[f"moe.experts.{n}"][e] for n in ("0_weight", "0_bias", "2_weight", "2_bias")
                        )
                        out = F.linear(F.gelu(F.linear(x[b, t], up, up_b)), down, down_b)
                        y[b, t] = y[b, t] + shares[b, t, e] / scale * out
        loss = E * (firsts / 10 * shares.flatten(0, 1).mean(0)).sum()
        total = total + (y.square().mean() + 0.1 * loss) / 2
    total.backward()
    torch.set_default_dtype(torch.float32)
    return {name: w.grad for name, w in weights.items() if w.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {"k": 2, "drop_tokens": False},
        {"k": 1, "min_capacity": 1},
        {"k": 1, "drop_tokens": False, "noisy_gate_policy": "RSample"},
        {"k": 2, "drop_tokens": False, "noisy_gate_policy": "Jitter"},
    ],
)
def test_deepspeed_moe_equals_the_sum_over_the_experts(ranks: Any, options: dict[str, Any]) -> None:
    wanted = plain(options)
    for found in (train(1, 0, options), ranks(2, train, 2, 3, options)[0]):
        found.pop("counts")
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_padding_tokens_get_the_residual_expert_only() -> None:
    expert = nn.Linear(D, D)
    layer = MoE(D, expert, num_experts=2, use_residual=True, drop_tokens=False)
    x = torch.randn(1, 4, D)
    used = torch.tensor([1, 1, 0, 1])
    y, _, counts = layer(x, used)
    assert int(counts.sum()) == 3 and layer.mlp is not None and layer.coefficient is not None
    weights = layer.coefficient(x).softmax(-1)
    torch.testing.assert_close(y[0, 2], (layer.mlp(x) * weights[..., 1:])[0, 2])  # padding: no expert


@pytest.mark.parametrize("options", [{"drop_tokens": False}, {}, {"use_residual": True}])
def test_moe_inputs_without_tokens_add_nothing(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MoE(D, nn.Linear(D, D), E, min_capacity=9, **options).double()
    x = torch.randn(1, 4, D, dtype=torch.float64)
    y, loss, _ = layer(x)
    alone = y.square().sum() + loss
    wanted = torch.autograd.grad(alone, [*layer.parameters()])
    parts = [layer(part) for part in (x, x[:, :0], x[:0], x[0, :0])]
    assert [part[0].shape[:-1] for part in parts] == [(1, 4), (1, 0), (0, 4), (0,)]
    total = torch.stack([y.square().sum() + loss for y, loss, _ in parts]).sum()
    torch.testing.assert_close(total, alone, rtol=1e-10, atol=0)
    torch.testing.assert_close(torch.autograd.grad(total, [*layer.parameters()]), wanted, rtol=1e-10, atol=1e-12)


def test_gate_noise_has_the_distribution_of_its_policy(caplog: pytest.LogCaptureFixture) -> None:
    """RSample draws each expert with the probability of its score; Jitter's factors are from 0.99 to 1.01."""
    layer = MoE(D, nn.Linear(D, D), E, noisy_gate_policy="RSample", drop_tokens=False)
    x = torch.randn(D, generator=torch.Generator().manual_seed(0)).expand(1, 20000, D)
    shares = F.linear(x[0, 0], layer.gate.weight).softmax(-1)
    assert ((layer(x)[2] / 20000 - shares).abs() < 0.01).all()
    layer.eval()
    assert int(layer(x)[2].max()) == 20000  # without noise
    factors = GateNoise("jitter")(torch.zeros(1, 500, D))
    assert 0.99 <= factors.min() < 0.991 and 1.009 < factors.max() <= 1.01 and abs(factors.mean() - 1) < 1e-3
    MoE(D, nn.Linear(D, D), E, k=2, noisy_gate_policy="RSample")
    assert "noisy_gate_policy='RSample' has no effect with k=2, as in DeepSpeed" in caplog.text
    bound = GateNoise("jitter")
    state = DropoutState()
    state.samples = range(3)
    bound.bind("moe.gate.noise", state)
    with pytest.raises(
        ValueError, match=r"moe\.gate with jitter noise was given 10 tokens of a microbatch of 3 samples"
    ):
        bound(torch.zeros(2, 5, D))


def two_sizes() -> tuple[int, int, str]:
    """Models of different ep_size in one process; layers of different ep_size in one model are refused by name."""
    models = [Model(1), Model(2)]
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}}
    engines = [deepspeed.initialize(model=model, config=config)[0] for model in models]
    with pytest.raises(deepspeed.DeepSpeedConfigError) as error:
        deepspeed.initialize(model=nn.Sequential(*models), config=config)
    for engine in engines:
        engine.backward(engine(rows(engine.grid.rank).mean(0, keepdim=True)))
        engine.step()
    return engines[0].grid.expert.size, engines[1].grid.expert.size, str(error.value)


def test_models_of_different_ep_size_have_a_grid_each(ranks: Any) -> None:
    for first, second, told in ranks(2, two_sizes):
        assert (first, second) == (1, 2)
        assert "0.moe ep_size=1 and 1.moe ep_size=2 are layers of one model" in told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"noisy_gate_policy": "Gauss"}, "noisy_gate_policy='Gauss' is unknown: give 'Jitter', 'RSample' or None"),
        ({"use_tutel": True}, "use_tutel=True is not implemented"),
        ({"num_experts": 4, "ep_size": 3}, "ep_size=3 does not divide num_experts=4"),
        ({"expert": nn.BatchNorm1d(D)}, "the expert has the buffer running_mean"),
        ({"expert": nn.Sequential(triax.Dropout(0.5))}, "has the Dropout '0', which .* same numbers in each"),
        ({"expert": AuxiliaryLayer()}, "the expert is of class AuxiliaryLayer, which .* their losses would be lost"),
    ],
)
def test_unsupported_moe_options_are_refused(options: dict[str, Any], text: str) -> None:
    arguments = {"expert": nn.Linear(D, D), **copy.deepcopy(options)}
    with pytest.raises(ValueError, match=text):
        MoE(D, **arguments)
    assert deepspeed.moe.layer.MoE is MoE
