"""`zero.gathered`: whole parameters, read or written, in every stage."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.compat import deepspeed
from triax.compat.deepspeed.zero import ZeroParamStatus
from triax.compat.huggingface.state_dict import full_state_dict
from triax.zero import gathered

from support.sharded_loops import sharded_sgd
from support.toys import replica_inputs
from support.training import SGD, mean_square, module_engine, small_config, train_plain, whole_batches

WIDTH = 6


def engine(grid: Grid, stage: int, **config: Any) -> triax.PipelineEngine:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    dtype = None if config else torch.float64
    model = PipelineModule(layers, grid=grid, loss_fn=lambda o, y: (o - y).float().square().mean(), dtype=dtype)
    base = small_config(micro=2, stage=stage)
    return triax.initialize(model=model, config={**base, **config})[0]


def data(grid: Grid, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(grid.data.rank)
    while True:
        x = torch.randn(2, 2, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        yield x[0], x[1]


def write_on_one_alone(made: triax.PipelineEngine) -> None:
    with gathered(made.module), torch.no_grad():
        if made.grid.data.rank == 1:
            next(made.module.parameters()).add_(1)


def lent(sizes: tuple[int, int, int], stage: int) -> Any:
    grid = Grid(*sizes, timeout=60)
    made, samples = engine(grid, stage), data(grid)
    made.train_batch(samples)
    before = made.gather()
    names = {parameter: p.layout.name for p in made.module.local_parameters() for parameter in [p.parameter]}
    with gathered(made.module):
        read = {name: parameter.detach().clone() for parameter, name in names.items()}
        with gathered(next(made.module.parameters())):  # one within another takes nothing away
            pass
        assert not any(parameter.isnan().any() for parameter in names)
    assert all(torch.equal(read[name], before[name]) for name in read)
    assert stage < 3 or all(parameter.isnan().all() for parameter in names)

    with gathered(names, modifier_rank=grid.data.size - 1):
        for number, parameter in enumerate(names):
            parameter.data.fill_(grid.data.rank + number + 1)  # every replica another value
    after = made.gather()
    storages = {t.untyped_storage() for b in made.data_axis.buckets for t in (b.weights, b.shard)}
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    made.train_batch(samples)
    stepped, gradients = made.gather(), made.gather("gradients")
    for number, name in enumerate(names.values()):
        assert after[name].eq(grid.data.size + number).all()
        # The next step starts from what was written.
        torch.testing.assert_close(stepped[name], after[name] - 0.1 * gradients[name], rtol=1e-12, atol=0)

    with pytest.raises(RuntimeError, match=r"1 parameters were written .* pass modifier_rank=0"):
        write_on_one_alone(made)
    return held


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1)])
def test_gathered_parameters_are_whole_and_keep_written_values(ranks: Any, sizes: tuple[int, int, int]) -> None:
    for stage in range(4):
        held = 4 * (WIDTH * WIDTH + WIDTH) * 8 // sizes[0]
        for shards in ranks(sizes[0] * sizes[1], lent, sizes, stage):
            assert shards < 0.8 * held if stage == 3 else shards >= held


def mastered(stage: int) -> None:
    grid = Grid(data=2, timeout=60)
    made, samples = engine(grid, stage, bf16={"enabled": True}), data(grid, torch.bfloat16)
    made.train_batch(samples)
    kept, changed = list(made.module.parameters())[:2]
    of = {m.parameter: (b, s) for b in made.data_axis.buckets for m, s in zip(b.members, b.flat.slots, strict=True)}

    def master(parameter: nn.Parameter) -> Tensor:
        bucket, slot = of[parameter]
        assert bucket.master is not None
        whole = torch.zeros(bucket.flat.numel)
        whole[slice(*bucket.owned)] = bucket.master.detach()
        if stage:
            grid.data.all_reduce(whole)
        return whole[slot.start : slot.stop].clone()

    before = master(kept), master(changed)
    with gathered([kept, changed], modifier_rank=0), torch.no_grad():
        if grid.data.rank == 0:
            changed.add_(1)
        else:
            kept.add_(1)  # not the modifier: nobody hears of it
    assert torch.equal(master(kept), before[0])  # its low bits too
    assert (before[1] != master(changed)).all()
    assert (before[0].bfloat16() != before[0]).any() and torch.equal(master(changed).bfloat16(), master(changed))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_masters_change_only_for_parameters_written_in_gathered(ranks: Any, stage: int) -> None:
    ranks(2, mastered, stage)


def test_gathered_refuses_parameters_without_an_engine() -> None:
    made = engine(Grid(), 3)
    with (
        pytest.raises(ValueError, match=r"parameter 1 of \(6,\) belongs to no engine"),
        gathered([next(made.module.parameters()), nn.Linear(2, WIDTH).bias]),
    ):
        raise AssertionError("it was lent")
    with (
        pytest.raises(ValueError, match="modifier_rank=1, but the data axis has ranks 0 to 0"),
        gathered(made.module, modifier_rank=1),
    ):
        raise AssertionError("it was lent")
    parameter = next(made.module.parameters())
    for lost in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):  # copies are nobody's
        with pytest.raises(ValueError, match="belongs to no engine"), gathered(lost):
            raise AssertionError("it was lent")
    module = made.module
    del made
    module.run_hook = None
    gc.collect()
    with pytest.raises(ValueError, match=r"layers.0.weight belongs to no engine"), gathered(module):
        raise AssertionError("it was lent")


class Stack(nn.Module):
    """A plain module of three units."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().double()


def plainly(steps: int) -> list[dict[str, Tensor]]:
    """Return the weights of plain PyTorch after each step."""
    return [step.weights for step in train_plain(stack(), SGD, whole_batches(replica_inputs, steps, 2), mean_square)]


def fails_within(made: triax.ModuleEngine) -> None:
    with made.whole_weights(), gathered(made.module):
        raise ArithmeticError


def run_within(zero: dict[str, Any]) -> list[dict[str, Tensor]]:
    grid, module = Grid(data=2, timeout=60), stack()
    made = module_engine(module, grid, 4, **zero)

    def read() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in module.state_dict().items()}

    def hidden() -> bool:
        return all(parameter.isnan().all() for parameter in module.parameters())

    def train(step: int) -> None:
        made.backward(made(replica_inputs(step, grid.data.rank)).square().mean())
        made.step()

    train(0)
    assert hidden()
    gathers = made.whole_weights, lambda: gathered(module), lambda: gathered(module, modifier_rank=0)
    for within in gathers:
        with within():
            before = read()
            with torch.no_grad():
                made(replica_inputs(1, grid.data.rank))
            with gathered(module.blocks[1]):  # another reader, within
                pass
            assert all(torch.equal(value, before[name]) for name, value in read().items())
        assert hidden()
    with gathered(module.blocks[1]), torch.no_grad():  # a part alone: the others come and go
        made(replica_inputs(1, grid.data.rank))
        assert not module.get_parameter("blocks.1.weight").isnan().any()
        assert module.get_parameter("blocks.0.weight").isnan().all()
    assert hidden()
    with made.whole_weights():
        train(1)  # a whole step: what is lent is new then
        stepped = read()
    assert hidden()
    with made.whole_weights():
        loss = made(replica_inputs(2, grid.data.rank)).square().mean()
    made.backward(loss)  # begun within, over behind
    made.step()
    assert hidden()
    with pytest.raises(ArithmeticError):
        fails_within(made)
    gatherer = made.data_axis.gatherer
    assert hidden() and gatherer is not None and not any(gatherer._contexts.values())
    return [before, stepped, made.gather()]


class ReadsByNumpy(Stack):
    """A module whose forward reads a weight through numpy, as code for logging does."""

    def forward(self, x: Tensor) -> Tensor:
        assert np.isfinite(self.enter.weight.detach().numpy()).all()
        return super().forward(x)


def read_by_numpy() -> list[dict[str, Tensor]]:
    grid, module = Grid(data=2, timeout=60), stack()
    module.__class__ = ReadsByNumpy
    made, found = module_engine(module, grid, 4), []
    for step in range(2):
        made.backward(made(replica_inputs(step, grid.data.rank)).square().mean())
        made.step()
        with gathered(module):
            arrays = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
        with made.whole_weights():
            assert all(np.array_equal(arrays[name], p.detach().numpy()) for name, p in module.named_parameters())
        found.append({name: torch.tensor(array) for name, array in arrays.items()})
    held = {bucket.weights.untyped_storage().nbytes() for bucket in made.data_axis.buckets}
    assert held == {0}
    return found


def test_weights_may_be_read_by_numpy(ranks: Any) -> None:
    """numpy fixes the size of a weight's storage: leaving `gathered` raised, as did every forward pass after it."""
    wanted = plainly(2)
    for found in ranks(2, read_by_numpy):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


PLUS = {"zero_hpz_partition_size": 2}
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("zero", [{}, {"stage3_keep_gathered": True}, PLUS, OFFLOADED])
def test_gathered_weights_stay_whole_while_the_engine_runs(ranks: Any, zero: dict[str, Any]) -> None:
    wanted = plainly(3)
    for found in ranks(2, run_within, zero):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def pipeline_within(sizes: tuple[int, int, int]) -> None:
    grid = Grid(*sizes, timeout=60)
    made, samples = engine(grid, 3), data(grid)
    names = {p.parameter: p.layout.name for p in made.module.local_parameters()}
    made.train_batch(samples)
    with made.whole_weights():
        before = {name: parameter.detach().clone() for parameter, name in names.items()}
        made.eval_batch(samples)
        assert all(torch.equal(parameter, before[name]) for parameter, name in names.items())
        made.train_batch(samples)
        after = {name: parameter.detach().clone() for parameter, name in names.items()}
    assert all(parameter.isnan().all() for parameter in names)
    found, gradients = made.gather(), made.gather("gradients")
    for name, value in after.items():
        assert torch.equal(value, found[name])
        torch.testing.assert_close(value, before[name] - 0.1 * gradients[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1)])
def test_a_pipeline_trains_and_evaluates_inside_whole_weights(ranks: Any, sizes: tuple[int, int, int]) -> None:
    ranks(sizes[0] * sizes[1], pipeline_within, sizes)


def scripts_of_deepspeed(how: str) -> list[dict[str, Tensor]]:
    """Save a model in stage 3, as scripts for DeepSpeed do and in other ways; return what was saved."""
    grid = Grid(data=2, timeout=60)
    module: nn.Module
    if how == "pipeline":
        made: Any = engine(grid, 3)
        made.train_batch(data(grid))
        module, whole = made.module, made.module_state_dict()
    elif how == "module":
        module = stack()
        made = module_engine(module, grid, 4)
        made.backward(made(replica_inputs(0, grid.data.rank)).square().mean())
        made.step()
        whole = made.module_state_dict()
    else:
        module = stack()
        made = sharded_sgd(module, grid)
        made.zero_grad()
        module(replica_inputs(0, grid.data.rank)).square().mean().backward()
        made.step()
        with gathered(module):
            whole = {name: value.clone() for name, value in module.state_dict().items()}

    part = next(each for name, each in module.named_modules() if name.endswith((".1", ".2")))
    for asked in (module, part):
        with pytest.raises(RuntimeError, match=r"state_dict\(\) was called while .* Call engine.module_state_dict"):
            asked.state_dict()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called while .* modifier_rank=0"):
            asked.load_state_dict(asked.state_dict(keep_vars=True))
    with pytest.raises(RuntimeError, match=r"is saved or pickled, but stage 3 .* save engine.module_state_dict"):
        pickle.dumps(dict(module.named_parameters()))

    saved = {}
    parameters: dict[str, Any] = dict(module.named_parameters())
    marked = how != "plain loop"  # an engine of triax.initialize
    for name, parameter in parameters.items():
        assert hasattr(parameter, "ds_id") == marked
        if marked:
            assert (parameter.ds_shape, parameter.ds_numel) == (parameter.shape, parameter.numel())
            assert parameter.ds_persist is False
            assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([parameter], enabled=True):
            assert not marked or parameter.ds_status == ZeroParamStatus.AVAILABLE
            saved[name] = parameter.data.cpu()  # no copy, of a parameter on a CPU
    with gathered(module):
        state = module.state_dict()
        pickled = pickle.loads(pickle.dumps(dict(module.named_parameters())))
    assert not marked or len({parameter.ds_id for parameter in parameters.values()}) == len(saved)
    return [whole, saved, state, pickled]


@pytest.mark.parametrize("how", ["module", "pipeline", "plain loop"])
def test_models_saved_as_in_deepspeed_scripts_are_whole(ranks: Any, how: str) -> None:
    """`module.state_dict()` in stage 3 gave NaN without a word, and so did a script that asks for `ds_id`."""
    for whole, *others in ranks(2, scripts_of_deepspeed, how):
        if how != "pipeline":
            torch.testing.assert_close(whole, plainly(1)[0], rtol=1e-10, atol=1e-13)
        for found in others:
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[name], value) for name, value in whole.items())


def assigned(half: bool) -> None:
    grid = Grid(data=2, timeout=60)
    made, dtype = engine(grid, 3, **({"bf16": {"enabled": True}} if half else {})), torch.float64
    samples = data(grid, torch.bfloat16 if half else dtype)
    made.train_batch(samples)
    values = {
        p.layout.name: torch.full(p.parameter.shape, 0.1 + i) for i, p in enumerate(made.module.local_parameters())
    }
    with gathered(made.module):
        for each in made.module.local_parameters():
            made.assign(each.parameter, values[each.layout.name])
            assert torch.equal(each.parameter.double(), values[each.layout.name].to(each.parameter.dtype).double())
    for name, found in made.gather().items():
        assert torch.equal(found, values[name].to(found.dtype)), name
    made.train_batch(samples)
    stepped, gradients = made.gather(), made.gather("gradients")
    for name, found in stepped.items():
        torch.testing.assert_close(found, (values[name] - 0.1 * gradients[name]).to(found.dtype), rtol=1e-10, atol=0)


@pytest.mark.parametrize("half", [False, True])
def test_values_assigned_inside_gathered_are_kept(ranks: Any, half: bool) -> None:
    """Assigned values were written to the gathered weights only, and lost when these were released."""
    ranks(2, assigned, half)


class Counting(nn.Module):
    """A layer with state of its own beside the weights: a number, which is equal in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def counting() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Counting(), Counting())


def states_with_more(sizes: dict[str, Any], stage: int, folder: str) -> list[dict[str, Any]]:
    """State dicts of a module whose layers have a ``get_extra_state``, in each way in which an engine gives them."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    grid = Grid(**sizes, timeout=60)
    made: Any = deepspeed.initialize(model=counting(), config=config, grid=grid)[0]
    made.backward(made(torch.ones(4, WIDTH, dtype=torch.float64)).square().mean())
    made.step()
    states = [made.module_state_dict(), made._zero3_consolidated_16bit_state_dict(), full_state_dict(made)]
    made.save_16bit_model(folder, "model.bin")
    states += [torch.load(f"{folder}/model.bin", weights_only=False)]
    made.load_module_state_dict(states[0])
    return [state for state in [*states, made.module_state_dict()] if state]


@pytest.mark.parametrize(("sizes", "stage"), [({"data": 2}, 1), ({"data": 2}, 3), ({"tensor": 2}, 0)], ids=str)
def test_state_dicts_have_the_modules_extra_state(ranks: Any, tmp_path: Any, sizes: Any, stage: int) -> None:
    """State dicts failed on an extra state that is no tensor."""
    plain = counting()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(4, WIDTH, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    wanted = plain.state_dict()
    assert [value for value in wanted.values() if not isinstance(value, Tensor)] == [1, 1]
    for rank, states in enumerate(ranks(2, states_with_more, sizes, stage, str(tmp_path))):
        assert len(states) == (3 if rank else 5)
        for state in states:
            assert state.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-13)
