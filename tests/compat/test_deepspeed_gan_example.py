"""DeepSpeedExamples' GAN, two engines in one loop, beside plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import triax.compat.deepspeed as deepspeed

from support.deepspeed_arguments import arguments


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.main(x)
        return y


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.main(x).view(-1)
        return y


def weights_init(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.2)
        nn.init.zeros_(m.bias)


def gan(folder: str, stage: int) -> None:
    args = arguments()
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.5, 0.999], "eps": 1e-8}},
        "steps_per_print": 10,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }

    def engines() -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(999)
        net_g, net_d = Generator(), Discriminator()
        net_g.apply(weights_init)
        net_d.apply(weights_init)
        made = []
        for net in (net_d, net_g):
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.5, 0.999))
            made.append(
                deepspeed.initialize(
                    args=args, model=net, model_parameters=net.parameters(), optimizer=optimizer, config=config
                )[0]
            )
        return net_g, net_d, made[0], made[1]

    net_g, net_d, engine_d, engine_g = engines()
    criterion = nn.BCELoss()
    device = engine_d.device
    rank = engine_d.global_rank

    def step(nets: tuple[Any, Any, Any, Any], index: int) -> tuple[float, float]:
        net_g, net_d, engine_d, engine_g = nets
        generator = torch.Generator().manual_seed(100 * index + rank)
        net_d.zero_grad()
        real = (torch.rand(8, 6, generator=generator) * 0.1 + 0.5).to(device)
        label = torch.full((8,), 1.0, device=device)
        error_real = criterion(net_d(real), label)
        engine_d.backward(error_real)
        noise = torch.randn(8, 4, generator=generator).to(device)
        fake = net_g(noise)
        label.fill_(0.0)
        error_fake = criterion(net_d(fake.detach()), label)
        engine_d.backward(error_fake)
        engine_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        error_g = criterion(net_d(fake), label)
        engine_g.backward(error_g)
        engine_g.step()
        return (error_real + error_fake).item(), error_g.item()

    nets = net_g, net_d, engine_d, engine_g
    losses = [step(nets, index) for index in range(20)]
    first = [d for d, _ in losses[:6]]
    assert first == sorted(first, reverse=True) and all(math.isfinite(d + g) for d, g in losses)
    engine_d.save_checkpoint(f"{folder}/d")
    engine_g.save_checkpoint(f"{folder}/g")
    on = [step(nets, index) for index in range(20, 24)]
    again = engines()
    again[2].load_checkpoint(f"{folder}/d")
    again[3].load_checkpoint(f"{folder}/g")
    assert [step(again, index) for index in range(20, 24)] == on
    reference_gan(losses, engine_d.world_size)


def reference_gan(losses: list[tuple[float, float]], replicas: int) -> None:
    """Compare the first losses of this rank with torch's own loop over all replicas' batches."""
    torch.manual_seed(999)
    net_g, net_d = Generator(), Discriminator()
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.5, 0.999)) for net in (net_d, net_g)]
    criterion = nn.BCELoss()
    rank = dist.get_rank() if dist.is_initialized() else 0
    for index in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        fakes = []
        for replica in range(replicas):
            generator = torch.Generator().manual_seed(100 * index + replica)
            real = torch.rand(8, 6, generator=generator) * 0.1 + 0.5
            fakes.append(net_g(torch.randn(8, 4, generator=generator)))
            error = criterion(net_d(real), torch.ones(8)) + criterion(net_d(fakes[-1].detach()), torch.zeros(8))
            (error / replicas).backward()
            if replica == rank:
                torch.testing.assert_close(losses[index][0], error.item(), rtol=1e-4, atol=1e-5)
        optimizers[0].step()
        for replica, fake in enumerate(fakes):
            error = criterion(net_d(fake), torch.ones(8))
            (error / replicas).backward()
            if replica == rank:
                torch.testing.assert_close(losses[index][1], error.item(), rtol=1e-4, atol=1e-5)
        optimizers[1].step()


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deepspeeds_gan_example_trains_as_plain_pytorch(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2, gan, str(tmp_path), stage)


def test_the_gan_trains_in_stage_2(ranks: Any, tmp_path: Path) -> None:
    """The others run in the exhaustive sweep."""
    ranks(2, gan, str(tmp_path), 2)
