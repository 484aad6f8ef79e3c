"""Scripts with the calls of DeepSpeedExamples, in their order: each trains, is saved and goes on where it was saved.

Each function is a short script of its own; the originals run after their line ``import deepspeed`` is changed
(docs/deepspeed.md).
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import triax.compat.deepspeed as deepspeed
from triax.compat.deepspeed.accelerator import get_accelerator
from triax.compat.deepspeed.utils import log_dist

from support.deepspeed_arguments import arguments


def images(samples: int, width: int = 12) -> TensorDataset:
    """Ten classes of noisy images, (3, width, width)."""
    torch.manual_seed(7)
    labels = torch.arange(samples) % 10
    means = torch.randn(10, 3, width, width)
    return TensorDataset(means[labels] + 0.3 * torch.randn(samples, 3, width, width), labels)


def require_falling(losses: list[float]) -> None:
    assert all(math.isfinite(loss) for loss in losses), losses
    third = max(1, len(losses) // 3)
    assert sum(losses[-third:]) < 0.9 * sum(losses[:third]), losses


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(6 * 5 * 5, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(F.relu(self.conv(x))).view(-1, 6 * 5 * 5)
        logits: Tensor = self.fc2(F.relu(self.fc1(y)))
        return logits


def cifar(dtype: str, stage: int, folder: str) -> list[float]:
    args = arguments()
    deepspeed.init_distributed()
    get_accelerator().set_device(args.local_rank)
    config = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {
            "enabled": dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,  # this model is so small that none of it would be sharded
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }

    def engine_of(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = Net()
        parameters = filter(lambda p: p.requires_grad, net.parameters())
        engine, _, loader, _ = deepspeed.initialize(
            args=args, model=net, model_parameters=parameters, training_data=images(160), config=config
        )
        return engine, loader

    engine, loader = engine_of(0)
    device = get_accelerator().device_name(engine.local_rank)
    target = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else torch.float32
    criterion = nn.CrossEntropyLoss()
    losses = []

    def epoch(engine: Any, loader: Any) -> None:
        for data in loader:
            inputs, labels = data[0].to(device).to(target), data[1].to(device)
            loss = criterion(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    epoch(engine, loader)
    engine.save_checkpoint(folder)
    epoch(engine, loader)
    require_falling(losses)
    again, loader = engine_of(1)
    path, _ = again.load_checkpoint(folder)
    assert path is not None and again.global_steps == 10
    epoch(again, loader)
    assert losses[20:] == losses[10:20]  # the resumed run repeats the second epoch
    again.eval()
    with torch.no_grad():
        x, y = images(40)[:]
        assert (again(x.to(target)).max(1).indices == y).float().mean() > 0.5
    return losses


CIFAR = [("fp16", 0), ("bf16", 3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "stage"), [*CIFAR, ("fp16", 3), ("bf16", 1), ("fp32", 2)])
def test_deepspeeds_cifar10_example_trains_as_plain_pytorch(ranks: Any, tmp_path: Path, dtype: str, stage: int) -> None:
    ranks(2, cifar, dtype, stage, str(tmp_path))


def alexnet(stages: int, folder: str) -> list[float]:
    args = arguments()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(1138)
    deepspeed.runtime.utils.set_random_seed(1138)  # type: ignore[attr-defined]  # a module of the ledger

    def engine_of() -> Any:
        features = [
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
        ]
        classifier = [nn.Linear(8 * 16, 32), nn.ReLU(inplace=True), nn.Linear(32, 10)]
        net = deepspeed.PipelineModule(
            layers=[*features, nn.AdaptiveAvgPool2d(4), lambda x: torch.flatten(x, 1), *classifier],
            loss_fn=nn.CrossEntropyLoss(),
            num_stages=stages,
            partition_method="parameters",
            activation_checkpoint_interval=0,
        )
        config = {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}},
            "steps_per_print": 10,
            "wall_clock_breakdown": False,
        }
        parameters = [p for p in net.parameters() if p.requires_grad]
        engine, _, _, _ = deepspeed.initialize(
            args=args, model=net, model_parameters=parameters, training_data=images(80), config=config
        )
        return engine

    engine = engine_of()
    losses = [engine.train_batch().item() for _ in range(10)]
    engine.save_checkpoint(folder)
    losses += [engine.train_batch().item() for _ in range(5)]
    require_falling(losses)
    again = engine_of()
    again.load_checkpoint(folder)
    assert [again.train_batch().item() for _ in range(5)] == losses[10:]
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [1, 2])
def test_deepspeeds_alexnet_pipeline_trains_as_plain_pytorch(ranks: Any, tmp_path: Path, stages: int) -> None:
    ranks(2, alexnet, stages, str(tmp_path))


class MaskedLM(nn.Module):
    """An encoder that returns the loss of its masked tokens, as the model of HelloDeepSpeed does."""

    def __init__(self, vocabulary: int = 24, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(8, width)
        layers = [nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
        self.encoder = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, src_tokens: Tensor, attention_mask: Tensor, tgt_tokens: Tensor) -> Tensor:
        x = self.embedding(src_tokens) + self.position.weight[: src_tokens.shape[1]]
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=~attention_mask.bool())
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tgt_tokens.flatten(), ignore_index=-100)


def masked_batches(size: int) -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        first = torch.randint(3, 24, (size, 1), generator=generator)
        tokens = (first + torch.arange(8) - 3) % 21 + 3
        masked = torch.rand(tokens.shape, generator=generator) < 0.3
        masked[:, 0] = False
        masked[:, 1] = True
        targets = tokens.masked_fill(~masked, -100)
        yield {
            "src_tokens": tokens.masked_fill(masked, 1),
            "attention_mask": torch.ones_like(tokens),
            "tgt_tokens": targets,
        }


def hello(dtype: str, folder: str, load: bool = False) -> list[float]:
    deepspeed.init_distributed()
    torch.manual_seed(42)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        dtype: {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    log_dist("Creating DeepSpeed engine", ranks=[0])
    net = MaskedLM()
    model, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    start = 1
    if load:
        _, client_state = model.load_checkpoint(load_dir=folder)
        start = client_state["checkpoint_step"] + 1
    log_dist(f"Total number of model parameters: {sum(p.numel() for p in model.parameters()):,d}", ranks=[0])
    model.train()
    losses = []
    batches = masked_batches(8)
    for _ in range(start - 1):
        next(batches)
    for step, batch in enumerate(batches, start=start):
        if step > 24:
            break
        for key, value in batch.items():
            batch[key] = value.to(model.device)
        loss = model(**batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step == 16 and not load:
            model.save_checkpoint(save_dir=folder, client_state={"checkpoint_step": step})
    return losses


def hello_twice(dtype: str, folder: str) -> None:
    losses = hello(dtype, folder)
    require_falling(losses)
    assert hello(dtype, folder, load=True) == losses[16:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_hello_deepspeed_trains_and_resumes(ranks: Any, tmp_path: Path, dtype: str) -> None:
    ranks(2, hello_twice, dtype, str(tmp_path))


class Prompts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(10) * (1 + index % 3) + index) % 29 + 2
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def sft(stage: int, folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

    args = arguments()
    get_accelerator().set_device(max(args.local_rank, 0))
    device = torch.device(get_accelerator().device_name())
    deepspeed.init_distributed()
    config = {
        "train_batch_size": 4 * dist.get_world_size() * 2,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
    }

    def engine_of() -> Any:
        torch.manual_seed(1234)
        sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
        no_decay = ["bias", "norm.weight"]
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ]
        ops: Any = importlib.import_module("triax.compat.deepspeed.ops.adam")  # from the ledger, not seen by mypy
        optimizer = ops.FusedAdam(groups, lr=1e-2, betas=(0.9, 0.95))
        scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=40)
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, args=args, config=config, lr_scheduler=scheduler, dist_init_required=True
        )
        engine.gradient_checkpointing_enable()
        return engine

    model = engine_of()
    loader = DataLoader(Prompts(), collate_fn=collate, sampler=DistributedSampler(Prompts()), batch_size=4)

    def epoch(model: Any) -> list[float]:
        model.train()
        losses = []
        for batch in loader:
            batch = {key: value.to(device) for key, value in batch.items()}
            outputs = model(**batch, use_cache=False)
            model.backward(outputs.loss)
            model.step()
            losses.append(outputs.loss.item())
        return losses

    def evaluate(model: Any) -> float:
        model.eval()
        with torch.no_grad():
            mean = torch.stack([model(**batch).loss.float() for batch in loader]).mean()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    before = evaluate(model)
    losses = epoch(model) + epoch(model)
    require_falling(losses)
    assert evaluate(model) < 0.9 * before
    model.tput_timer.update_epoch_count()
    model.save_checkpoint(folder, client_state={"epoch": 2})
    model.save_16bit_model(folder)
    after = epoch(model)
    again = engine_of()
    _, state = again.load_checkpoint(folder)
    assert state == {"epoch": 2} and epoch(again) == after
    if stage == 3:  # as DeepSpeed-Chat saves a model of stage 3
        whole = {}
        for name, parameter in model.module.named_parameters():
            released = (
                hasattr(parameter, "ds_id") and parameter.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
            )
            with deepspeed.zero.GatheredParameters([parameter] if released else [], enabled=True):
                whole[name] = parameter.data.cpu().clone()
        assert not any(bool(value.isnan().any()) for value in whole.values())
    if model.global_rank == 0:
        saved = torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)
        assert all(value.dtype == torch.bfloat16 for name, value in saved.items() if "inv_freq" not in name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_chats_sft_step_trains_as_plain_pytorch(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2, sft, stage, str(tmp_path))
