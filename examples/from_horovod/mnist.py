"""Horovod's loop for a classifier of digits, with the import changed.

python examples/from_horovod/mnist.py
triax run --nproc 4 examples/from_horovod/mnist.py --fp16-allreduce
torchrun --nproc-per-node 4 examples/from_horovod/mnist.py --epochs 3
mpirun -np 4 python examples/from_horovod/mnist.py

The digits are drawn by numpy: ten drawings, each shifted, scaled in brightness and with noise added.
"""

from __future__ import annotations

import argparse

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import triax.compat.horovod as hvd  # was: import horovod.torch as hvd

Batches = DataLoader[tuple[Tensor, ...]]
SIDE, CLASSES = 12, 10


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=3)
        self.conv2 = nn.Conv2d(6, 12, kernel_size=3)
        self.fc1 = nn.Linear(12 * 3 * 3, 24)
        self.fc2 = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, SIDE, SIDE) -> (B, CLASSES), logarithms of probabilities."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))  # (B, 6, 5, 5)
        x = F.relu(self.conv2(x))  # (B, 12, 3, 3)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count: int, seed: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Images (count, 1, SIDE, SIDE) and their classes (count,)."""
    drawings = numpy.random.default_rng(0).random((CLASSES, SIDE, SIDE)) > 0.6
    random = numpy.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    shifts = random.integers(-1, 2, (count, 2))
    images = numpy.stack(
        [numpy.roll(drawings[label], shift, (0, 1)) for label, shift in zip(labels, shifts, strict=True)]
    )
    images = images * random.uniform(0.5, 1.0, (count, 1, 1)) + 0.2 * random.standard_normal(images.shape)
    return TensorDataset(torch.from_numpy(images).to(dtype).unsqueeze(1), torch.from_numpy(labels))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Batches, epoch: int, args: argparse.Namespace
) -> None:
    """Train for one epoch on this rank's part of the data."""
    model.train()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    for number, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        if args.clip:
            optimizer.synchronize()  # type: ignore[attr-defined]
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()
        else:
            optimizer.step()
        if number % args.log_interval == 0 and hvd.rank() == 0:
            print(f"epoch {epoch} batch {number} of {len(loader)}: loss {loss.item():.4f}", flush=True)


def metric_average(value: float, name: str) -> float:
    """Return the average over all ranks."""
    return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name))


def test(model: nn.Module, loader: Batches, epoch: int) -> tuple[float, float]:
    """Return the loss and the accuracy on held-out digits."""
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += output.argmax(1).eq(target).sum().item()
    samples = len(loader.sampler)  # type: ignore[arg-type]
    loss, right = metric_average(loss / samples, "avg_loss"), metric_average(right / samples, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch} held out: loss {loss:.4f}, accuracy {right:.1%}", flush=True)
    return loss, right


def main() -> tuple[nn.Module, list[tuple[float, float]]]:
    """Train; returns the model, and loss and accuracy after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05, help="of one rank: it is multiplied by their number")
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=8)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 2 bytes a number")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--clip", type=float, default=0.0, help="the norm that gradients are clipped to")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # broadcast_parameters makes the models alike
    dtype = torch.float64 if args.double else torch.float32

    train_set, test_set = digits(args.samples, 1, dtype), digits(args.samples // 4, 2, dtype)
    train_sampler: DistributedSampler[int] = DistributedSampler(train_set, hvd.size(), hvd.rank())
    test_sampler: DistributedSampler[int] = DistributedSampler(test_set, hvd.size(), hvd.rank())
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, 64, sampler=test_sampler)

    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    results = []
    for epoch in range(1, args.epochs + 1):
        train(model, optimizer, train_loader, epoch, args)
        results.append(test(model, test_loader, epoch))
    return model, results


if __name__ == "__main__":
    main()
