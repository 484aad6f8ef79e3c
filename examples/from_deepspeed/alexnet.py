"""AlexNet of DeepSpeed's pipeline tutorial, with fewer channels, on images drawn by numpy.

    cd examples/from_deepspeed
    torchrun --nproc-per-node 4 alexnet.py -p 2 --deepspeed_config alexnet.json
    python alexnet.py -p 0 --deepspeed_config alexnet.json     # without a pipeline: forward, backward, step

``--specs`` builds each layer on the rank that runs it (``LayerSpec``), instead of all layers on every rank.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import triax.compat.deepspeed as deepspeed  # was: import deepspeed
from triax import LayerSpec, RepeatingLoader  # was: from deepspeed.pipe, and from deepspeed.utils
from triax.compat.deepspeed import PipelineModule  # was: from deepspeed.pipe import PipelineModule

CLASSES, SIZE, SAMPLES = 10, 64, 64


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, with an eighth of the original's channels."""

    def __init__(self, num_classes: int = CLASSES, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(8, 24, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(24, 48, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(48, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(32 * 2 * 2, 64),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        y: Tensor = self.classifier(x)
        return y


def join_layers(vision_model: AlexNet) -> list[Any]:
    """Return the model's layers as one list."""
    return [
        *vision_model.features,
        vision_model.avgpool,
        lambda x: torch.flatten(x, 1),
        *vision_model.classifier,
    ]


class AlexNetPipe(PipelineModule):
    """AlexNet from ``LayerSpec`` s: a rank builds only the layers that it runs."""

    def __init__(self, num_classes: int = CLASSES, dropout: float = 0.5, **kwargs: Any) -> None:
        self.num_classes = num_classes
        specs: list[Any] = [
            LayerSpec(nn.Conv2d, 3, 8, kernel_size=11, stride=4, padding=2),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.MaxPool2d, kernel_size=3, stride=2),
            LayerSpec(nn.Conv2d, 8, 24, kernel_size=5, padding=2),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.MaxPool2d, kernel_size=3, stride=2),
            LayerSpec(nn.Conv2d, 24, 48, kernel_size=3, padding=1),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Conv2d, 48, 32, kernel_size=3, padding=1),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Conv2d, 32, 32, kernel_size=3, padding=1),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.MaxPool2d, kernel_size=3, stride=2),
            LayerSpec(nn.AdaptiveAvgPool2d, (2, 2)),
            lambda x: torch.flatten(x, 1),
            LayerSpec(nn.Dropout, dropout),
            LayerSpec(nn.Linear, 32 * 2 * 2, 64),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Dropout, dropout),
            LayerSpec(nn.Linear, 64, 64),
            LayerSpec(nn.ReLU, inplace=True),
            LayerSpec(nn.Linear, 64, self.num_classes),
        ]
        super().__init__(layers=specs, loss_fn=nn.CrossEntropyLoss(), **kwargs)


def trainset(dtype: torch.dtype) -> torch.utils.data.TensorDataset:
    """Images of noise, each with a bright bar; the class is the position of the bar."""
    random = numpy.random.default_rng(0)
    pictures = random.standard_normal((SAMPLES, 3, SIZE, SIZE))
    labels = numpy.arange(SAMPLES) % CLASSES
    for picture, label in zip(pictures, labels, strict=True):
        picture[:, :, label * 6 : label * 6 + 6] += 2.0
    return torch.utils.data.TensorDataset(torch.from_numpy(pictures).to(dtype), torch.from_numpy(labels))


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="as launchers pass it")
    parser.add_argument("-s", "--steps", type=int, default=20)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2, help="0: no pipeline")
    parser.add_argument("--partition", default="parameters", help="DeepSpeed's partition_method")
    parser.add_argument("--specs", action="store_true", help="LayerSpecs in place of layers that are built")
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--double", action="store_true", help="float64")
    parser.add_argument("--seed", type=int, default=1138)
    return deepspeed.add_config_arguments(parser).parse_args()


def train_base(args: argparse.Namespace, net: AlexNet, dtype: torch.dtype) -> Any:
    """Train without a pipeline: forward, backward, step."""
    engine, _, dataloader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset(dtype),
    )
    data_iter = iter(RepeatingLoader(dataloader))
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(args.steps * engine.gradient_accumulation_steps()):
        batch = next(data_iter)
        loss = criterion(engine(batch[0].to(engine.device)), batch[1].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.module_state_dict()


def train_pipe(args: argparse.Namespace, net: AlexNet, dtype: torch.dtype) -> Any:
    """Train with a pipeline: train_batch."""
    shared: dict[str, Any] = {
        "num_stages": args.pipeline_parallel_size,
        "partition_method": args.partition,
        "activation_checkpoint_interval": 0,
    }
    if args.specs:
        pipe: PipelineModule = AlexNetPipe(dropout=args.dropout, dtype=dtype, base_seed=args.seed, **shared)
    else:
        pipe = PipelineModule(layers=join_layers(net), loss_fn=nn.CrossEntropyLoss(), **shared)
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=pipe,
        model_parameters=[p for p in pipe.parameters() if p.requires_grad],
        training_data=trainset(dtype),
    )
    losses = [engine.train_batch().item() for _ in range(args.steps)]
    return losses, engine.module_state_dict()


def main() -> tuple[list[float], dict[str, Tensor]]:
    """Train; return the losses (with a pipeline: of whole batches) and the weights."""
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    dtype = torch.float64 if args.double else torch.float32
    net = AlexNet(dropout=args.dropout).to(dtype)
    train = train_pipe if args.pipeline_parallel_size else train_base
    losses, weights = train(args, net, dtype)
    if torch.distributed.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses, weights


if __name__ == "__main__":
    main()
