"""Several sets of adapters in one model, and adapters merged into the weights, against PEFT in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import triax
from triax.grid import Grid
from triax.models.layers import NextTokenLoss
from triax.tensor_parallel.embedding import gather_logits

from support.command_line import output_of
from support.lora_runs import (
    EPS,
    LR,
    VOCAB,
    Sizes,
    batch,
    engine_of,
    equals_peft,
    factors,
    loaded,
    logits_of,
    make,
    saved,
    step,
)

FIRST: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
SECOND: dict[str, Any] = {"r": 2, "lora_alpha": 6, "target_modules": ["v_proj", "o_proj", "down_proj"]}
WAYS: list[tuple[str, ...]] = [("first",), ("second",), ("first", "second"), ()]


def two_adapters(folder: Path) -> Any:
    """PEFT's model with two random adapters, written to two folders."""
    import peft

    torch.manual_seed(2)
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(**FIRST, init_lora_weights=False), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(**SECOND, init_lora_weights=False))
    model.save_pretrained(str(folder))
    return model


def logits_in_each_way(folder: Path, adapters: Path) -> list[Tensor]:
    grid = Grid(tensor=2)
    module = triax.PipelineModule(triax.load_hf(folder), grid=grid, dtype=torch.float64).eval()
    for name in ("first", "second"):
        triax.load_lora(adapters / name, module, name=name)
        triax.save_lora(module, adapters / "again" / name, name=name)
    found = []
    for names in WAYS:
        triax.use_lora(module, names)
        with torch.no_grad():
            y = module(batch(0, 9, 0)[0])
            found.append(gather_logits(y, grid=grid, vocab_size=VOCAB))
    triax.use_lora(module, ("first", "second"))
    triax.save_hf(module, adapters / "merged", merge_lora=True)
    triax.merge_lora(module)
    with torch.no_grad():
        found.append(gather_logits(module(batch(0, 9, 0)[0]), grid=grid, vocab_size=VOCAB))
    assert not [name for name, p in module.named_parameters() if ".lora." in name or not p.requires_grad]
    with pytest.raises(triax.ConfigError, match="has no adapters 'third'"):
        triax.use_lora(module, "third")
    return found


def test_each_set_and_their_sum_give_pefts_logits(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """The merged model gives them too, and each set is written back bit by bit."""
    folder, adapters = saved(tmp_path / "model", "llama"), tmp_path / "adapters"
    model = two_adapters(adapters)
    found = ranks(2, logits_in_each_way, folder, adapters)[0]
    for names, logits in zip([*WAYS, ("first", "second")], found, strict=True):
        if names:
            model.base_model.set_adapter([*names])
            wanted = logits_of(model)
        else:
            with model.disable_adapter():
                wanted = logits_of(model)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(logits_of(loaded(adapters / "merged")), found[-1], rtol=0, atol=1e-10)
    for name in ("first", "second"):
        mine, theirs = (load_file(each / name / "adapter_model.safetensors") for each in (adapters / "again", adapters))
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)


def train_second(folder: Path, adapters: Path, sizes: Sizes) -> tuple[Any, ...]:
    """A run that trains the second of two sets, with the checkpoint and tokens of each set."""
    grid = Grid(*sizes)
    how: dict[str, Any] = {"grid": grid, "loss_fn": NextTokenLoss(grid, VOCAB), "chunks": 2, "dtype": torch.float64}
    other = triax.PipelineModule(triax.load_hf(folder), **how)
    triax.load_lora(adapters / "first", other, name="first")
    triax.add_lora(other, {"rank": 3}, name="default")
    with pytest.raises(RuntimeError, match="was changed since it was built"):  # stages move under zb-v
        other.move([0, 1, 1, 0])
    module = triax.PipelineModule(triax.load_hf(folder), placement=[0, 1, 1, 0], **how)
    triax.load_lora(adapters / "first", module, name="first")
    triax.add_lora(module, {"rank": 3, "alpha": 8.0}, name="default")
    triax.use_lora(module, "default")
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01, "eps": EPS}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"schedule": "zb-v"},
    }
    engine: Any = triax.initialize(model=module, config=settings)[0]
    start = {name: value for name, value in factors(engine.gather()).items() if "@" not in name}
    losses = [step(engine, number) for number in range(2)]
    end, gradients = engine.gather(), engine.gather("gradients")
    triax.save_lora(engine, adapters / "after", name="first")
    engine.save_checkpoint(adapters / "checkpoints")
    inference, tokens = triax.init_inference(engine), []
    for name in ("default", "first"):
        triax.use_lora(engine, name)
        tokens.append(inference.generate([[3, 5, 7]], 6, temperature=0.0))
    with pytest.raises(RuntimeError, match="are trained, but not active"):
        step(engine, 2)
    return losses, start, gradients, {name: end[name] for name in start}, tokens


def test_one_adapter_set_trains_beside_a_frozen_one(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    folder, adapters = saved(tmp_path / "model", "llama"), tmp_path / "adapters"
    two_adapters(adapters)
    runs = ranks(4, train_second, folder, adapters, (2, 1, 2))
    equals_peft(
        [run[:4] + ({},) for run in runs], "llama", {"r": 3, "lora_alpha": 8, "target_modules": "all-linear"}, 1
    )
    assert runs[0][4][0] != runs[0][4][1]
    mine, theirs = (load_file(adapters / each / "adapter_model.safetensors") for each in ("after", "first"))
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    output_of("checkpoint", "export", adapters / "checkpoints", adapters / "exported", "--format", "hf")
    written = load_file(adapters / "exported" / "first" / "adapter_model.safetensors")
    assert all(torch.equal(written[key], theirs[key]) for key in theirs)
    assert (adapters / "exported" / "adapter_config.json").is_file()


def merged_base(folder: Path, form: Any) -> tuple[Tensor, Tensor, list[str]]:
    grid = Grid(tensor=2)
    module = triax.PipelineModule(triax.load_hf(folder), grid=grid, dtype=torch.float64).eval()
    triax.add_lora(module, triax.Lora(rank=3, dora=True, base=form))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(".B"):
                parameter.fill_(0.02)
        logits = [module(batch(0, 9, 0)[0])]
        triax.merge_lora(module)
        logits.append(module(batch(0, 9, 0)[0]))
    return logits[0], logits[1], [name for name, _ in module.named_parameters()]


def test_adapters_are_merged_into_a_base_of_4_bits(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    before, after, names = ranks(2, merged_base, saved(tmp_path / "model", "wide"), "nf4-double")[0]
    torch.testing.assert_close(before, after, rtol=0, atol=1e-10)
    assert "layers.1.attention.q.weight" in names and not [name for name in names if "quantized" in name]


def refused(folder: Path) -> list[str]:
    engine = engine_of(folder, (1, 1, 1), FIRST, stage=0, schedule="1f1b")
    module = triax.PipelineModule(triax.load_hf(folder), grid=engine.grid, dtype=torch.float64)
    triax.add_lora(module, {"rank": 2, "dora": True}, name="dora")
    triax.add_lora(module, {"rank": 2}, name="plain")
    calls: list[Callable[[], None]] = [
        lambda: triax.merge_lora(engine),
        lambda: triax.use_lora(module, ("dora", "plain")),
        lambda: triax.add_lora(module, {"rank": 2, "base": "nf4"}, name="late"),
        lambda: triax.add_lora(module, {"rank": 2}, name="a.b"),
    ]
    messages = []
    for call in calls:
        with pytest.raises(triax.ConfigError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_impossible_uses_of_adapter_sets_are_refused(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    merge, both, late, name = ranks(1, refused, saved(tmp_path / "model", "llama"))[0]
    assert "triax.save_hf(engine, path, merge_lora=True)" in merge
    assert "'dora' use DoRA, whose update cannot be added" in both
    assert "give base only with the first adapters" in late and "no name of adapters" in name


class Pair(nn.Module):
    """Two linear layers and a norm. Only the first linear layer can be kept in 4 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(64, 7), nn.Linear(7, 4), nn.LayerNorm(4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.down(self.up(x)))
        return y


FAILED: dict[str, Callable[[Any, Path], None]] = {
    "no such layer": lambda model, _: triax.add_lora(model, {"rank": 3, "targets": ["up", "dwon"]}),
    "not linear": lambda model, _: triax.add_lora(model, {"rank": 3, "targets": ["up", "norm"]}),
    "no such layer over 8 bits": lambda model, _: triax.add_lora(model, {"targets": ["dwon"], "base": "int8"}),
    "odd inputs": lambda model, _: triax.add_lora(model, {"targets": ["up"], "base": "nf4"}),
    "an adapter with more names": lambda model, folder: triax.load_lora(folder, model, grid=Grid()),
}


def trained(model: nn.Module) -> list[Tensor]:
    """The weights after two steps of what is trained."""
    triax.add_lora(model, {"rank": 2, "targets": ["down"]})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 64, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters()]


@pytest.mark.parametrize("failed", FAILED)
def test_refused_adapters_leave_the_model_unchanged(tmp_path: Path, failed: str) -> None:
    """The model is as it was, and the next call is as the first on a new model."""
    adapter = Pair()
    triax.add_lora(adapter, {"rank": 2, "targets": ["up"]})
    triax.save_lora(adapter, tmp_path, grid=Grid())
    file = tmp_path / "adapter_model.safetensors"
    factors_of_file = load_file(file)
    save_file({**factors_of_file, "base_model.model.gone.lora_A.weight": torch.ones(2, 3)}, file)
    model = Pair()
    with pytest.raises(ValueError):
        FAILED[failed](model, tmp_path)
    assert [*model.state_dict()] == [*Pair().state_dict()] and all(p.requires_grad for p in model.parameters())
    for mine, wanted in zip(trained(model), trained(Pair()), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)


def test_three_adapter_sets_on_one_layer_train_as_their_sum(tmp_path: Path) -> None:
    """Three sets on one layer, one of them loaded, train as the sum of their products in plain PyTorch."""
    model, plain, grid = Pair(), Pair(), Grid()
    triax.add_lora(model, {"rank": 2, "alpha": 4, "targets": ["up"]})
    triax.save_lora(model, tmp_path, grid=grid)
    triax.add_lora(model, {"rank": 3, "alpha": 6, "targets": ["up"]}, name="second")
    triax.load_lora(tmp_path, model, grid=grid, name="third")
    triax.use_lora(model, ("default", "second", "third"))
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in own.items():
        if name.endswith(".B"):
            nn.init.normal_(parameter)
    copied = {name: p.detach().clone().requires_grad_() for name, p in own.items()}
    products = [b @ a for a, b in zip([*copied.values()][::2], [*copied.values()][1::2], strict=True)]
    weight = plain.up.weight.detach() + 2 * (products[0] + products[1] + products[2])
    x = torch.linspace(-1, 1, 128, dtype=torch.float64).view(2, 64)
    model(x).square().sum().backward()
    torch.func.functional_call(plain, {"up.weight": weight}, x).square().sum().backward()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, copied[name].grad, rtol=0, atol=1e-10, msg=name)
