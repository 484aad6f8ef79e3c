"""Models built in shards have the values of models built whole, and no rank holds a whole model."""

from __future__ import annotations

import copy
import json
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import triax
import triax.compat.deepspeed as deepspeed
from triax import Grid
from triax.zero.gathered_parameters import gathered
from triax.zero.modules.units import find_units
from triax.zero.sharded_init import ShardedInit, sharded_parameter

from support.readme_blocks import block_of
from support.training import small_config

WIDTH, BLOCKS, WORDS = 24, 4, 11


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return x + y * self.scale


class Model(nn.Module):
    """A model that initializes its weights in the ways that models do: in its layers, from outside, tied, copied."""

    blocks: Any

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(BLOCKS)])
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.initialize)
        with torch.no_grad():
            for block in self.blocks:
                block.scale.mul_(0.5)
        self.blocks[0].layers[1].weight.data.div_(2.0).add_(0.01)
        self.bias = nn.Parameter(self.blocks[1].layers[0].bias.data.clone()[:WORDS])
        self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.1)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -0.1, 0.1)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.embedding(words))) + self.bias
        return y


def build(width: int = WIDTH) -> tuple[Any, Tensor]:
    torch.manual_seed(5)
    model = Model(width)
    return model, torch.rand(1)


class Storages(TorchDispatchMode):
    """Count of the bytes of all tensors made within: now and at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        for tensor in y if isinstance(y, (tuple, list)) else [y]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return y

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def compare_with_whole_model() -> tuple[int, int, int]:
    """Compare a model built in shards with one built whole; return bytes: held, the peak, and those of the whole."""
    grid = Grid()
    whole, drawn = build(width=128)
    model: Any
    with Storages() as count:
        torch.manual_seed(5 if grid.rank == 0 else 6)  # another seed: the first rank's values count
        with ShardedInit(grid.data, grid.device):
            model = Model(width=128)
            again = torch.rand(1)
        peak = count.peak
        records = [record for p in model.parameters() if (record := sharded_parameter(p)) is not None]
        bytes_held = sum(record.shard.nbytes for record in records)
    assert grid.rank > 0 or torch.equal(again, drawn)
    assert all(p.shape == q.shape for p, q in zip(model.parameters(), whole.parameters(), strict=True))
    for parameter in model.parameters():
        assert parameter.is_floating_point() == (sharded_parameter(parameter) is not None)
        assert not parameter.is_floating_point() or bool(parameter.isnan().all())
    with gathered([p for p in model.parameters() if p.is_floating_point()]):
        for (name, parameter), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(parameter, wanted), name
    return bytes_held, peak, sum(p.nbytes for p in whole.parameters())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_built_in_shards_holds_its_share_of_bytes(ranks: Any, size: int) -> None:
    for held, peak, whole in ranks(size, compare_with_whole_model):
        assert whole / size <= held + 8 <= whole / size * 1.03  # the integer stays whole; shards are padded
        if size == 4:
            assert peak < 0.75 * whole, (held, peak, whole)


def outside_the_constructor() -> None:
    whole, _ = build()
    torch.manual_seed(5)
    with deepspeed.zero.Init():
        model = Model()
    with pytest.raises(RuntimeError, match=r"load_state_dict.. was called while \d+ parameters"):
        model.load_state_dict(whole.state_dict())
    with deepspeed.zero.GatheredParameters([model.bias], modifier_rank=0):  # one module at a time, as transformers
        some = {"bias": model.bias.detach().clone(), "embedding.weight": whole.embedding.weight}
        model._load_from_state_dict(some, "", {}, True, [], [], [])
    first: Any = next(iter(model.parameters()))
    assert first.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE and first.ds_shape == first.shape
    with (
        pytest.raises(RuntimeError, match="2 parameters were written"),
        deepspeed.zero.GatheredParameters(first),
        torch.no_grad(),
    ):
        first.add_(1.0)
    rank = Grid().rank
    with deepspeed.zero.GatheredParameters(model.blocks.parameters(), modifier_rank=0):
        if rank == 0:
            model.blocks.load_state_dict({k: v * 2 for k, v in whole.blocks.state_dict().items()})
    with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False):
        assert bool(first.isnan().all())
    words = torch.arange(6).view(2, 3)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        for parameter, wanted in zip(model.blocks.parameters(), whole.blocks.parameters(), strict=True):
            assert torch.equal(parameter, wanted * 2)
        assert model(words).shape == (2, 3, WORDS)
    first.data = torch.full((WORDS + 1, WIDTH), 2.0)  # as transformers resizes an embedding
    with deepspeed.zero.GatheredParameters(first):
        assert torch.equal(first, torch.full((WORDS + 1, WIDTH), 2.0))
    ready = copy.deepcopy(whole)
    deepspeed.zero.Init(module=ready, dtype=torch.bfloat16)
    assert next(ready.parameters()).dtype == torch.bfloat16 and sharded_parameter(next(ready.parameters()))
    with deepspeed.zero.Init(enabled=False):
        assert sharded_parameter(next(Model().parameters())) is None
    with pytest.raises(RuntimeError, match=r"nn\.Parameter\(p\.data\.clone"), ShardedInit(Grid().data, Grid().device):
        Bad()
    assert not hasattr(nn.Linear.__init__, "triax_shard") and sharded_parameter(nn.Linear(2, 2).weight) is None


class Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.weight = nn.Parameter(self.linear.weight)


def test_parameters_are_gathered_before_initialize(ranks: Any) -> None:
    ranks(2, outside_the_constructor)


def trained(stage: int, folder: str, built: str) -> None:
    """Train a model built in shards, against the same one built whole on one process."""
    whole, _ = build()
    whole = whole.double()
    zero = {"stage": stage, "reduce_bucket_size": 900, "stage3_param_persistence_threshold": 0}  # so small a model too
    settings: dict[str, Any] = small_config(batch=4, zero=zero)
    if built == "offloaded":
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    torch.manual_seed(5)
    if built == "ready":
        model = Model().double()
        deepspeed.zero.Init(module=model)
    else:
        path = Path(folder) / f"{os.getpid()}.json"  # not read while another rank writes it
        path.write_text(json.dumps(settings))
        with deepspeed.zero.Init(config_dict_or_path=str(path)):
            model = Model().double()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1)
    words = torch.randint(WORDS, (3, 4, 5), generator=torch.Generator().manual_seed(1))
    share = 4 // engine.world_size
    for step in words:
        mine = step[engine.global_rank * share : (engine.global_rank + 1) * share]
        engine.backward(engine(mine).square().mean())
        engine.step()
        optimizer.zero_grad()
        whole(step).square().mean().backward()
        gradients = engine.gather("gradients")
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
        optimizer.step()
    weights = engine.module_state_dict()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(weights[name].to(parameter.dtype), parameter, rtol=1e-10, atol=1e-12)


def test_initialize_uses_a_model_built_in_shards(ranks: Any, tmp_path: Path) -> None:
    ranks(2, trained, 3, str(tmp_path), "shards")


@pytest.mark.exhaustive
@pytest.mark.parametrize("built", ["shards", "ready", "offloaded"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 4])
def test_initialize_uses_models_built_in_shards_in_every_stage(
    ranks: Any, tmp_path: Path, size: int, stage: int, built: str
) -> None:
    ranks(size, trained, stage, str(tmp_path), built)


def given_to_a_native_engine() -> None:
    with deepspeed.zero.Init():
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert hasattr(model[0].weight, "ds_status")
    sgd, zero = partial(torch.optim.SGD, lr=0.1), triax.Zero(stage=3)
    engine = triax.Engine(model, optimizer=sgd, zero=zero, batch=triax.Batch(size=2))
    assert not [name for p in model.parameters() for name in vars(p) if name.startswith("ds_")]
    with deepspeed.zero.GatheredParameters(model[0].weight):
        assert torch.equal(model[0].weight, engine.gather()["0.weight"]) and bool(model[1].weight.isnan().all())


def test_a_native_engine_keeps_no_marks_of_deepspeed(ranks: Any) -> None:
    ranks(2, given_to_a_native_engine)


class Tied(nn.Module):
    """A module whose last layer uses the weight of a layer in another unit."""

    blocks: Any

    def __init__(self, register: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        if register:
            deepspeed.zero.register_external_parameter(self, self.blocks[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.blocks[0].weight.T


def external() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # DeepSpeed's default leaves so small a model whole
    settings = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "zero_optimization": zero}
    torch.manual_seed(0)
    model = Tied(register=True).double()
    reference = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    x = torch.eye(2, 4, dtype=torch.float64)
    engine.backward(engine(x[engine.global_rank][None]).square().mean())
    engine.step()
    reference(x).square().mean().backward()
    for name, gradient in engine.gather("gradients").items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="call it before"):
        deepspeed.zero.register_external_parameter(model, model.blocks[1].weight)


def test_external_parameters_are_gathered_where_registered(ranks: Any) -> None:
    ranks(2, external)
    module, parameter = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    deepspeed.zero.register_external_parameter(module, parameter)
    deepspeed.zero.unregister_external_parameter(module, parameter)
    with pytest.raises(RuntimeError, match="not registered"):
        deepspeed.zero.unregister_external_parameter(module, parameter)


def test_z3_leaf_modules_are_one_unit() -> None:
    def units() -> list[str]:
        return [name for name, _ in find_units(model)]

    utils: Any = deepspeed.utils
    model: Any = nn.Sequential(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), nn.Linear(2, 2))
    assert units() == ["", "0.a", "0.b", "1"]
    assert utils.set_z3_leaf_modules(model, [nn.ModuleDict]) == [model[0]] == utils.get_z3_leaf_modules(model)
    assert units() == ["", "0", "1"]
    assert utils.z3_leaf_module(model[0])
    utils.unset_z3_leaf_modules(model, ["ModuleDict"])
    assert units() == ["", "0.a", "0.b", "1"]
    assert utils.set_z3_leaf_modules_by_name(model, ["0.a", "x"], raise_if_not_found=False) == ([model[0]["a"]], ["x"])
    assert utils.set_z3_leaf_modules_by_suffix(model, [".b"])[0] == [model[0]["b"]]
    with pytest.raises(ValueError, match="Conv1d"):
        utils.set_z3_leaf_modules(model, [nn.Conv1d])


def documented(block: str) -> None:
    space: dict[str, Any] = {"torch": torch}
    exec(block, space)
    assert all(sharded_parameter(parameter) is not None for parameter in space["module"].parameters())


def test_the_lines_of_the_zero_page_build_a_sharded_model(ranks: Any) -> None:
    ranks(2, documented, block_of("zero.md", "import triax.compat"))
