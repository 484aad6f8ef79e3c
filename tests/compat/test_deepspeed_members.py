"""Members of DeepSpeed's engine: what they return, what may be assigned, what waits in host memory."""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import triax
import triax.compat.deepspeed as deepspeed
from triax.compat.deepspeed import PipelineModule
from triax.compat.deepspeed.configuration import OffloadDeviceEnum
from triax.compat.deepspeed.context import CONTEXT
from triax.compat.deepspeed.engine import DeepSpeedPipelineEngine
from triax.compat.deepspeed.grids import ParallelGrid
from triax.compat.deepspeed.offload_states import OffloadStateTypeEnum, get_state_devices
from triax.pipe.spec import LayerSpec

from support.module_training import MICRO, WIDTH, config, microbatch, net


def members() -> list[Any]:
    model = net()
    data = torch.utils.data.TensorDataset(*torch.randn(2, 16, WIDTH))
    settings = {**config("AdamW", 2, 2), "steps_per_print": 7, "fp16": {"enabled": True, "initial_scale_power": 4}}
    engine, optimizer, loader, _ = deepspeed.initialize(model=model, config=settings, training_data=data)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    for x, y in loader:
        engine.backward((engine(x) - y).square().mean().float())
        engine.step()
    assert engine.was_step_applied() and optimizer.cur_scale == optimizer.loss_scale == 16 and not optimizer.overflow
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25] and engine.get_mom() == [(0.9, 0.999)] and engine.get_type() == [None]
    engine.tput_timer.update_epoch_count()
    engine.timers("data").start()
    engine.timers("data").stop()
    assert engine.timers("data").elapsed() >= 0 and engine.tput_timer.epoch_count == 1
    engine.empty_partition_cache()
    engine._backward_epilogue()
    total = torch.ones(1)
    dist.all_reduce(total, group=engine.data_parallel_group) if engine.world_size > 1 else None
    assert total == engine.dp_world_size and engine.zero_optimization_partition_gradients()
    assert engine.optimizer_name() == "AdamW" and engine.zero_overlap_comm() and engine.dynamic_loss_scale()
    with pytest.raises(AssertionError, match="no_sync"), engine.no_sync():
        pass
    wrong: Any = 1.0
    with pytest.raises(AssertionError, match="a float"):
        engine.backward(wrong)
    with pytest.raises(ValueError, match="leave training_data out"):
        engine.set_train_micro_batch_size(2)
    with pytest.raises(AttributeError, match="neither DeepSpeedEngine nor its Net has 'wieghts'"):
        engine.wieghts  # noqa: B018
    engine.destroy()
    free, *_ = deepspeed.initialize(model=net(), config=config())
    free.set_train_micro_batch_size(2)
    assert free.get_batch_info() == (2 * free.world_size, 2, 1)
    return [engine.global_rank, engine.local_rank, engine.mp_world_size, engine.steps_per_print()]


def test_engine_members_return_their_values_on_each_rank(ranks: Any) -> None:
    assert ranks(2, members) == [[0, 0, 1, 7], [1, 1, 1, 7]]


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).square()
        return y


def pipeline() -> list[Any]:
    model = PipelineModule([Square(), Square(), Square()], num_stages=2, loss_fn=nn.MSELoss())
    data = torch.utils.data.TensorDataset(*torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)))
    settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    assert isinstance(engine, DeepSpeedPipelineEngine) and isinstance(engine.grid, ParallelGrid)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    engine.set_dataloader(loader)
    first = engine.train_batch()
    engine.set_batch_fn(lambda batch: (batch[0] * 0, batch[1] * 0))
    engine.set_dataiterator(iter(loader))
    second = engine.train_batch()
    assert engine.was_step_applied() and second < first
    engine.set_batch_fn(lambda batch: tuple(part.unsqueeze(1).expand(-1, 3, -1) for part in batch))
    engine.reset_activation_shape()  # activations of another shape
    engine.set_dataiterator(iter(loader))
    assert engine.train_batch() > 0
    for wrong in (engine.forward, engine.backward, engine.step):
        with pytest.raises(RuntimeError, match="train_batch"):
            wrong()
    with pytest.raises(NotImplementedError, match="reduce_output=None would not be the mean"):
        engine.eval_batch(iter(loader), reduce_output=None)
    grid, groups = engine.grid, importlib.import_module("triax.compat.deepspeed.utils.groups")
    assert dist.get_world_size(groups._get_data_parallel_group()) == groups._get_data_parallel_world_size() == 1
    assert groups._get_broadcast_src_rank() == grid.rank and groups.get_model_parallel_world_size() == 2
    assert groups._get_sequence_parallel_rank() == groups._get_expert_parallel_rank("ep_size_1") == 0
    with pytest.raises(ValueError, match=r"asked for ep_size_2, but the engine's experts are spread over 1 ranks"):
        groups._get_expert_data_parallel_group("ep_size_2")
    assert grid.get_pipe_parallel_rank() == grid.get_stage_id() == engine.stage_id == grid.stage_id
    assert grid.get_model_parallel_world_size() == 2 and grid.get_slice_parallel_world_size() == 1
    assert dist.get_world_size(grid.get_data_parallel_group()) == grid.get_data_parallel_world_size() == 1
    assert grid.pp_group == [0, 1] and grid.dp_group == [grid.rank] and engine.is_pipe_parallel
    assert (engine.prev_stage, engine.next_stage) == (grid.rank - 1, grid.rank + 1) and not engine.is_data_parallel
    return [engine.is_first_stage(), engine.is_last_stage(), engine.micro_batches, grid.stage_to_global(1)]


def test_pipeline_engine_members_return_their_values(ranks: Any) -> None:
    assert ranks(2, pipeline) == [[True, False, 2, 1], [False, True, 2, 1]]


def pipeline_of_one() -> Any:
    """The engine of a pipeline whose grid is its own, while another model's grid exists."""
    other = nn.Linear(2, 2)
    CONTEXT.keep_grid(triax.Grid(), other)
    model = PipelineModule([Square(), Square()], num_stages=1, loss_fn=nn.MSELoss())
    settings = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    return deepspeed.initialize(model=model, config=settings)[0]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        # those that diffusion-pipe assigns
        ("_report_progress", "steps_per_print"),
        ("_broadcast_model", "engine does this work itself"),
        ("clip_fp32_gradients", "gradient_clipping"),
        ("_INSTRUCTION_MAP", "not classes of instructions"),
        ("communication_data_type", "the configuration"),
        # and others that DeepSpeed's engines call or read
        ("_exec_forward_pass", "not classes of instructions"),
        ("_exec_optimizer_step", "not classes of instructions"),
        ("_configure_optimizer", "optimizer="),
        ("_take_model_step", "optimizer="),
        ("gradient_clipping", "gradient_clipping"),
        ("gradient_accumulation_steps", "set_train_batch_size"),
        ("is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary"),
        ("_is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary"),
        ("allreduce_gradients", "no_sync"),
        ("module_state_dict", "exclude_frozen_parameters"),
        ("_save_checkpoint", "exclude_frozen_parameters"),
        ("global_samples", "the state of the run"),
        ("zero_optimization_stage", "the configuration"),
        ("loss_model", "loss_fn="),
        ("_config", "the configuration"),
        ("curriculum_enabled_legacy", "engine does this work itself"),
    ],
)
def test_an_assignment_without_effect_is_refused(name: str, advice: str) -> None:
    """diffusion-pipe assigns methods on DeepSpeed's engine class, which triax's engine would never call."""
    engine = pipeline_of_one()
    for owner in (deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine, engine):
        before = vars(owner).get(name)
        with pytest.raises(AttributeError, match=rf"{name} was assigned, which would have no effect.*{advice}"):
            setattr(owner, name, lambda *args: None)
        assert vars(owner).get(name) is before


def test_another_optimizer_is_refused_after_the_start() -> None:
    engine = pipeline_of_one()
    with pytest.raises(AttributeError, match="another optimizer, which would have no effect"):
        engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.0)
    with pytest.raises(AttributeError, match=r"enable_backward_allreduce was assigned.*no_sync"):
        engine.enable_backward_allreduce = False
    engine.enable_backward_allreduce = True  # as it is
    for owner in (engine, deepspeed.PipelineEngine):  # read, as diffusion-pipe does for this name
        with pytest.raises(AttributeError, match=r"_INSTRUCTION_MAP.*not classes of instructions"):
            owner._INSTRUCTION_MAP  # noqa: B018


def test_assignments_with_an_effect_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-NeoX sets the number of microbatches of an evaluation; others wrap methods, and set a schedule."""
    engine = pipeline_of_one()
    data = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)]
    read = iter(data)
    engine.micro_batches = 1
    engine.first_output_send, engine.pipe_recv_buf = True, None  # each batch sends its shapes
    loss, outputs = engine.eval_batch(read, return_logits=True)
    assert len(outputs) == 1 and len(list(read)) == 1
    torch.testing.assert_close(loss.float(), nn.functional.mse_loss(outputs[0], data[0][1]))
    engine.micro_batches = 2
    assert engine.gradient_accumulation_steps() == 2 and engine.train_batch_size() == 4
    engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.5**step)
    plain, called = deepspeed.PipelineEngine.train_batch, []

    def wrapped(self: Any, *args: Any) -> Any:
        called.append(self)
        return plain(self, *args)

    monkeypatch.setattr(deepspeed.PipelineEngine, "train_batch", wrapped)
    engine.train_batch(iter(data))
    assert called == [engine] and engine.get_lr() == [0.5 * engine.optimizer.defaults["lr"]]
    engine.total_params = 3  # the script's own
    assert engine.total_params == 3


def swapped(cells: list[tuple[int, bool]]) -> None:
    """Weights after steps, between which states were moved to host memory and back, are those without it."""
    kinds = OffloadStateTypeEnum
    for stage, bf16 in cells:
        settings: dict[str, Any] = {
            **config(),
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        settings |= {"bf16": {"enabled": bf16}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        plain, engine = (deepspeed.initialize(model=net(), config=settings)[0] for _ in range(2))
        moved = engine.offloaded_states
        for number in range(3):
            for each in (plain, engine):
                if each is engine and number:
                    # On a CPU nothing moves by itself: these moves are those of a GPU.
                    chosen = (kinds.optim_states, kinds.hp_params) if number == 1 else None
                    moved.offload(engine, chosen, "cpu", True, False, frozenset({"cpu"}))
                    state = next(iter(engine.data_axis.optimizer.state.values()))["exp_avg"]
                    assert moved.holds(state) and state.untyped_storage().size() == 0 and state.numel() > 0
                    x = microbatch(number, 0, 0)[0].to(next(engine.module.parameters()).dtype)
                    if number == 1 and stage < 3:
                        with torch.no_grad():
                            engine.eval()(x)  # the module runs without optimizer state and masters
                        engine.train()
                    for call in (engine.step, engine.gather, *([] if number == 1 else [partial(engine.forward, x)])):
                        with pytest.raises(
                            AssertionError, match=r"after offload_states, which has moved .*(optim_states|lp_params)"
                        ):
                            call()
                    engine.reload_states()
                    assert not moved.holds(state) and state.untyped_storage().size() > 0
                for part in range(each.gradient_accumulation_steps()):
                    x, y = microbatch(number, part, each.grid.data.rank)
                    x, y = (tensor.bfloat16() if bf16 else tensor for tensor in (x, y))
                    each.backward((each(x) - y).square().mean())
                    each.step()
        for name, value in plain.gather().items():
            assert torch.equal(engine.gather()[name], value), (stage, bf16, name)
        engine.offload_states(include=[kinds.optim_states], device=OffloadDeviceEnum.cpu)
        assert get_state_devices(engine, kinds.optim_states) == {torch.device("cpu")}
        assert not moved.holds(state)  # it is in host memory already
        with pytest.raises(AssertionError, match=r"call engine\.reload_states"):
            engine.save_checkpoint("unused")
        engine.reload_states()
        with pytest.raises(ValueError, match="states can move only to host memory: give 'cpu'"):
            engine.offload_states(device="nvme")


def test_training_is_equal_after_states_move_to_host_memory(ranks: Any) -> None:
    swapped([(0, False), (1, True)])
    ranks(2, swapped, [(2, True), (3, False), (3, True)])


def test_initialize_refuses_two_configurations_or_none() -> None:
    args = type("Args", (), {"deepspeed_config": "a.json"})()
    for kind in (AssertionError, ValueError, deepspeed.DeepSpeedConfigError):
        with pytest.raises(kind, match=r"args\.deepspeed_config='a\.json' and config=: leave one out"):
            deepspeed.initialize(args, model=net(), config=config())
    args.deepspeed_config = None
    for given, end in ((args, r"JSON file, or start the script with --deepspeed_config FILE$"), (None, "JSON file$")):
        with pytest.raises(deepspeed.DeepSpeedConfigError, match=rf"no configuration: pass config=, .*{end}"):
            deepspeed.initialize(given, model=net())
    with pytest.raises(AssertionError, match="pass model="):
        deepspeed.initialize(config=config())
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="train_batch_size"):
        deepspeed.initialize(model=net(), config={"train_batch_size": 7, "train_micro_batch_size_per_gpu": MICRO})


class Mpu:
    """Process groups as Megatron's ``mpu`` gives them: tensor ranks are neighbors, unless ``outer``."""

    def __init__(self, tensor: int, outer: bool = False, data: int | None = None) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        rows = torch.arange(world).view(-1, tensor) if not outer else torch.arange(world).view(tensor, -1).T
        self.tensor, self.data = tensor, data or world // tensor
        for row in rows.tolist():
            group = dist.new_group(row)
            self.mine = group if rank in row else getattr(self, "mine", None)
        for column in rows.T.tolist():
            group = dist.new_group(column)
            self.replicas = group if rank in column else getattr(self, "replicas", None)

    def get_model_parallel_world_size(self) -> int:
        return self.tensor

    def get_model_parallel_group(self) -> Any:
        return self.mine

    def get_data_parallel_world_size(self) -> int:
        return self.data

    def get_data_parallel_group(self) -> Any:
        return self.replicas


class MegatronLinear(nn.Module):
    """A column-parallel linear layer as Megatron writes it, with its own collective and marks."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        rank = dist.get_rank(mpu.mine)
        whole = torch.arange(24, dtype=torch.float64).view(6, 4) / 24
        self.weight = nn.Parameter(whole.chunk(mpu.tensor)[rank].clone())
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # type: ignore[attr-defined]
        self.mpu = mpu

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight.T).square().sum()
        total = y.detach().clone()
        dist.all_reduce(total, group=self.mpu.mine)
        return y + (total - y.detach())


def with_mpu(outer: bool) -> tuple[Any, ...]:
    mpu = Mpu(2, outer)
    model = MegatronLinear(mpu)
    settings = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "gradient_clipping": 1.0}
    engine, *_ = deepspeed.initialize(model=model, mpu=mpu, config=settings)
    x = torch.eye(4, dtype=torch.float64)[engine.grid.data.rank]
    engine.backward(engine(x))
    engine.step()
    whole = torch.arange(24, dtype=torch.float64).view(6, 4) / 24
    gradient = torch.cat([whole[:, :2], torch.zeros(6, 2, dtype=torch.float64)], 1)  # of the mean over two replicas
    norm = engine.get_global_grad_norm()
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-12)
    torch.testing.assert_close(engine.gather()["weight"], whole - 0.01 * gradient / max(1.0, norm), atol=2e-8, rtol=0)
    with pytest.raises(AssertionError, match=r"data 3 x tensor 2 = 6 ranks, but there are 4 processes"):
        deepspeed.initialize(model=model, mpu=Mpu(2, data=3), config=settings)
    return engine.mp_world_size, engine.dp_world_size, engine.grid.tensor.ranks, engine.mpu is mpu


def test_an_mpu_gives_the_axes_of_the_grid(ranks: Any) -> None:
    assert ranks(4, with_mpu, False)[3] == (2, 2, (2, 3), True)
    assert ranks(4, with_mpu, True)[3] == (2, 2, (1, 3), True)


def from_the_configuration(specs: bool) -> tuple[int, float]:
    listed: list[Any] = [LayerSpec(Square) for _ in range(3)] if specs else [Square() for _ in range(3)]
    model = PipelineModule(listed, loss_fn=nn.MSELoss())
    data = torch.utils.data.TensorDataset(*torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)))
    settings = {"train_batch_size": 4, "optimizer": {"type": "SGD"}, "pipeline": {"stages": 2}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings, training_data=data
    )
    assert [*engine.parameters()] == [*engine.module.parameters()] and not hasattr(engine, "none")
    return engine.num_stages, engine.train_batch().item()


def mesh_of_the_configuration() -> tuple[int, int]:
    settings = {"train_batch_size": 4, "data_parallel_size": 1, "sequence_parallel_size": 2}
    engine, *_ = deepspeed.initialize(model=net(), config=settings)
    return engine.dp_world_size, dist.get_world_size(engine.seq_parallel_group)


def test_the_deepspeed_configuration_chooses_the_grid_axes(ranks: Any) -> None:
    assert ranks(2, mesh_of_the_configuration) == [(1, 2)] * 2


def test_the_deepspeed_configuration_chooses_the_stages(ranks: Any) -> None:
    found = ranks(2, from_the_configuration, True)
    assert found[0] == found[1] and found[0][0] == 2
    assert ranks(2, from_the_configuration, False)[0][0] == 2


def test_a_data_loader_as_training_data_is_refused() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    with pytest.raises(ValueError, match=r"training_data=loader\.dataset"):
        deepspeed.initialize(model=net(), config=config(), training_data=loader)


@pytest.mark.parametrize("first", [True, False])
def test_add_config_arguments_gives_scripts_their_local_rank(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    if not first:
        deepspeed.add_config_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=-1)
    if first:
        deepspeed.add_config_arguments(parser)
    assert parser.parse_args([]).local_rank == 1 and parser.parse_args(["--local_rank", "3"]).local_rank == 3
    assert not hasattr(deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args([]), "local_rank")


def test_a_dropped_deepspeed_engine_is_freed_at_once() -> None:
    """Without a garbage collection, also while the module lives on."""
    model = net()
    engine, *_ = deepspeed.initialize(model=model, config=config())
    for _ in range(2):
        engine.backward((engine(microbatch(0, 0, 0)[0])).square().mean())
        engine.step()
    watched = weakref.ref(engine)
    gc.disable()
    del engine
    freed = watched() is None
    gc.enable()
    assert freed


def test_the_throughput_timer_does_not_count_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    engine: Any = deepspeed.initialize(model=nn.Linear(2, 1), config=config("SGD", 2, 2))[0]
    x = torch.ones(2, 2)

    def run(module: Any, seconds: float) -> Tensor:
        loss: Tensor = module(x).sum()
        now[0] += seconds
        return loss

    for step in range(4):
        with torch.no_grad():
            run(engine, 100.0)
        engine.eval()
        run(engine, 100.0)
        if step != 3:  # in eval mode the backward pass begins the microbatch
            engine.train()
        for _ in range(2):
            engine.backward(run(engine, 0.5))
            now[0] += 0.25
            engine.step()
    assert engine.tput_timer.global_step_count == 4 and engine.tput_timer.total_elapsed_time == 2 * 0.75 + 2 * 0.25


def test_a_later_batch_fn_replaces_the_earlier_one() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(2, 1).double()
    model = PipelineModule(layers=[copy.deepcopy(plain)], loss_fn=nn.MSELoss(), num_stages=1)
    data = torch.utils.data.TensorDataset(torch.ones(4, 2, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))
    settings = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine: Any = deepspeed.initialize(model=model, config=settings, training_data=data)[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for factor in (10.0, 3.0, 0.5):
        engine.set_batch_fn(lambda batch, factor=factor: (batch[0] * factor, batch[1]))
        engine.train_batch()
        optimizer.zero_grad()
        x = torch.ones(4, 2, dtype=torch.float64)
        nn.functional.mse_loss(plain(x * factor), x[:, :1]).backward()
        optimizer.step()
    for mine, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
