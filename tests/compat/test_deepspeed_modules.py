"""DeepSpeed's modules over triax: fragments of parameters, collectives, accelerator, optimizers, topologies, files."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import triax.compat.deepspeed as deepspeed
from triax.compat.deepspeed import accelerator, comm, configuration, fp32_state_dict, fragments, utils
from triax.compat.deepspeed import optimizer_classes as optimizers
from triax.compat.deepspeed import process_topology as topology
from triax.compat.deepspeed.accelerator import get_accelerator
from triax.engine.accounting.memory import states_kept
from triax.grid.topology import Topology

LR, BETAS, EPS = 0.01, (0.9, 0.999), 1e-8


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(rank: int) -> Tensor:
    return torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def use_fragments(stage: int) -> dict[str, Any]:
    """One step; what the functions return before and after it, and after writing."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    parameters = list(engine.module.parameters())
    seen: dict[str, Any] = {}
    for microbatch in range(2):
        loss = engine(batch(2 * microbatch + engine.grid.rank)).square().mean()
        engine.backward(loss)
        early = [fragments.safe_get_full_grad(p) for p in parameters] if microbatch == 0 else []
        assert not any(each is not None for each in early)
        if microbatch == 1:
            seen["gradients"] = [fragments.safe_get_full_grad(p) for p in parameters]
            fragments.safe_update_full_grad_vectorized(parameters, lambda gradient, _: gradient * 2)
            seen["doubled"] = [fragments.safe_get_full_grad(p) for p in parameters]
            assert fragments.safe_get_full_optimizer_state(parameters[0], "exp_avg") is None
        engine.step()
    seen["weights"] = [fragments.safe_get_full_fp32_param(p) for p in parameters]
    seen["exp_avg"] = [fragments.safe_get_full_optimizer_state(p, "exp_avg") for p in parameters]
    seen["after"] = [fragments.safe_get_full_grad(p) for p in parameters]
    for parameter in parameters:
        fragments.safe_set_full_fp32_param(
            parameter, torch.full(parameter.ds_shape if stage == 3 else parameter.shape, 3)
        )
        fragments.safe_set_full_optimizer_state(parameter, torch.ones(parameter.shape), "exp_avg_sq")
        local = fragments.safe_get_local_optimizer_state(parameter, "exp_avg")
        assert local is not None
        fragments.safe_set_local_optimizer_state(parameter, torch.full_like(local, engine.grid.rank), "exp_avg")
        local = fragments.safe_get_local_fp32_param(parameter)
        assert local is not None
        seen["held"] = seen.get("held", 0) + local.numel()
    seen["set"] = list(engine.gather().values())
    seen["exp_avg_sq"] = [fragments.safe_get_full_optimizer_state(p, "exp_avg_sq") for p in parameters]
    with pytest.raises(ValueError, match=r"has no nonsense to set: give one that an engine trains"):
        fragments.safe_set_full_optimizer_state(parameters[0], torch.ones(parameters[0].shape), "nonsense")
    return seen


@pytest.mark.parametrize(
    ("stage", "size"),
    [
        (0, 1),
        pytest.param(0, 2, marks=pytest.mark.exhaustive),
        (1, 2),
        pytest.param(2, 2, marks=pytest.mark.exhaustive),
        (3, 2),
    ],
)
def test_parameter_fragments_equal_values_of_one_process(ranks: Any, stage: int, size: int) -> None:
    """Gradients, weights and state are those of one process in plain PyTorch, over the same batch."""
    plain = model()
    sources = [2 * microbatch + rank for microbatch in range(2) for rank in range(size)]
    torch.stack([plain(batch(source)).square().mean() for source in sources]).mean().backward()
    for seen in ranks(size, use_fragments, stage):
        whole = [torch.zeros(0) if p.grad is None else p.grad for p in plain.parameters()]
        for name, factor in (("gradients", 1), ("doubled", 2), ("after", 2), ("exp_avg", 2 * (1 - BETAS[0]))):
            for found, gradient in zip(seen[name], whole, strict=True):
                torch.testing.assert_close(found, factor * gradient, rtol=0, atol=1e-10)
        for found, parameter, mean in zip(seen["weights"], plain.parameters(), whole, strict=True):
            gradient = 2 * mean
            stepped = parameter.detach() - LR * gradient / (gradient.abs() + EPS)
            torch.testing.assert_close(found, stepped, rtol=0, atol=1e-10)
        assert all((weight == 3).all() for weight in seen["set"])
        assert all((state == 1).all() for state in seen["exp_avg_sq"])
        count = sum(p.numel() for p in plain.parameters())
        assert seen["held"] == count if stage == 0 or size == 1 else 0 < seen["held"] < count


class Branches(nn.Module):
    """Five layers. The loss uses the first two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(5, 1).double() for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x) + self.layers[1](x)
        return y


def set_gradients(stage: int) -> list[Tensor]:
    """Return the weights after two steps: gradients are set that the loss does not give, or that user code dropped."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20},
    }
    engine, *_ = deepspeed.initialize(model=Branches(), config=config)
    weights = [layer.weight for layer in engine.module.layers]
    for step in range(2):
        engine.backward(engine(batch(2 * step + engine.grid.rank)).square().mean())
        if stage < 3:
            weights[1].grad = None
        fragments.safe_update_full_grad_vectorized(weights, lambda gradient, _: gradient * 2)
        fragments.safe_set_full_grad(weights[1], torch.ones(1, 5))
        fragments.safe_set_full_grad(weights[2], torch.full((1, 5), 3.0))
        local = fragments.safe_get_local_grad(weights[3])
        assert local is not None
        fragments.safe_set_local_grad(weights[3], torch.full_like(local, step))
        engine.step()
    return list(engine.gather().values())


@pytest.mark.parametrize(("stage", "size"), [(0, 1), (0, 2), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_a_gradient_that_user_code_sets_is_used_in_the_step(ranks: Any, stage: int, size: int) -> None:
    """A parameter without a gradient is left out, by momentum and decay too; one whose gradient is set is stepped."""
    plain = Branches()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        torch.stack([plain(batch(2 * step + rank)).square().mean() for rank in range(size)]).mean().backward()
        first, *others = [parameter for name, parameter in plain.named_parameters() if name.endswith("weight")]
        assert first.grad is not None
        first.grad.mul_(2)
        for weight, value in zip(others, (1, 3, step), strict=False):
            weight.grad = torch.full_like(weight, value)
        optimizer.step()
    for weights in ranks(size, set_gradients, stage):
        for found, wanted in zip(weights, plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-10)


def use_comm() -> dict[str, Any]:
    rank, size = comm.get_rank(), comm.get_world_size()
    total = torch.tensor([float(rank + 1)])
    comm.all_reduce(total)
    gathered = torch.zeros(size)
    comm.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    objects: list[Any] = [None] * size
    comm.all_gather_object(objects, {"rank": rank})
    comm.barrier()
    group = comm.new_group([0])
    inside = comm.get_all_ranks_from_group(group) if rank == 0 else None
    mesh = comm.initialize_mesh_device((1, size), ("pipe", "data"))
    return {
        "total": total.item(),
        "gathered": gathered.tolist(),
        "objects": [each["rank"] for each in objects],
        "inside": inside,
        "global": comm.get_global_rank(comm.get_world_group(), size - 1),
        "mesh": mesh["data"].size(),
    }


def test_deepspeed_comm_computes_its_collectives(ranks: Any) -> None:
    for rank, seen in enumerate(ranks(2, use_comm_in_group)):
        inside = [0] if rank == 0 else None
        expected = {"total": 3.0, "gathered": [0.0, 1.0], "objects": [0, 1], "inside": inside, "global": 1, "mesh": 2}
        assert seen == expected


def use_comm_in_group() -> dict[str, Any]:
    deepspeed.init_distributed()
    return use_comm()


def test_init_distributed_takes_an_address(tmp_path: Path) -> None:
    deepspeed.init_distributed(dist_init_required=False)
    assert not comm.is_initialized()
    deepspeed.init_distributed("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert comm.is_initialized() and comm.get_rank() == 0 and comm.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_the_cpu_accelerator_has_deepspeeds_members() -> None:
    device = get_accelerator()
    assert device is get_accelerator() and accelerator.is_current_accelerator_supported()
    assert (device.device_name(), device.device_name(1), device.current_device_name()) == ("cpu", "cpu", "cpu")
    assert device.communication_backend_name() == "gloo" and device.is_available()
    assert device.device_count() == 1
    device.set_device(0)
    device.synchronize()
    device.empty_cache()
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() < device.total_memory()
    assert device.memory_stats()["allocated_bytes.all.peak"] == device.max_memory_allocated()
    assert 0 < device.available_memory() < device.total_memory()
    assert device.on_accelerator(torch.zeros(1)) and torch.bfloat16 in device.supported_dtypes()
    assert device.FloatTensor([1.0]).dtype == torch.float32 and device.Event is None
    with device.stream(device.current_stream()):
        pass
    accelerator.set_accelerator(device)


@pytest.mark.parametrize("adam_w", [True, False])
def test_fused_and_cpu_adam_step_as_torchs_adam(adam_w: bool) -> None:
    plain, fused, host = model(), model(), model()
    like = torch.optim.AdamW if adam_w else torch.optim.Adam
    pairs = [
        (plain, like(plain.parameters(), lr=LR, weight_decay=0.1)),
        (fused, optimizers.FusedAdam(fused.parameters(), lr=LR, adam_w_mode=adam_w, weight_decay=0.1)),
        (host, optimizers.DeepSpeedCPUAdam(host.parameters(), lr=LR, adamw_mode=adam_w, weight_decay=0.1)),
    ]
    for _ in range(3):
        for net, optimizer in pairs:
            net(batch(0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for net, _ in pairs[1:]:
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for kind, switch in ((optimizers.FusedAdam, "adam_w_mode"), (optimizers.DeepSpeedCPUAdam, "adamw_mode")):
        trained: Any = model()
        given: Any = kind
        config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}
        optimizer = given(trained.parameters(), lr=LR, weight_decay=0.1, **{switch: adam_w})
        engine, *_ = deepspeed.initialize(model=trained, optimizer=optimizer, config=config)
        for _ in range(3):
            engine.backward(engine(batch(0)).square().mean())
            engine.step()
        for found, theirs in zip(engine.gather().values(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, theirs.detach(), rtol=0, atol=1e-12)
        assert states_kept(optimizer) == states_kept(torch.optim.Adam(trained.parameters())) == 2
    with pytest.raises(ValueError, match=r"bias_correction=False\) is not possible as a class: let the configuration"):
        optimizers.FusedAdam(fused.parameters(), bias_correction=False)


def test_cpu_adam_keeps_fp32_state_of_bf16_parameters() -> None:
    start = torch.randn(64).bfloat16()
    low, high, own = (nn.Parameter(start.clone()), nn.Parameter(start.float()), nn.Parameter(start.clone()))
    found, wanted = optimizers.DeepSpeedCPUAdam([low]), torch.optim.AdamW([high], weight_decay=0.0)
    for _ in range(3):
        gradient = torch.randn(64).bfloat16()
        low.grad, high.grad = gradient.clone(), gradient.float()
        found.step(), wanted.step()
        high.data = high.data.bfloat16().float()
        torch.testing.assert_close(low.float(), high, rtol=0, atol=0)
    again = optimizers.DeepSpeedCPUAdam([own])
    again.load_state_dict(found.state_dict())
    for state in (found.state[low], again.state[own]):
        torch.testing.assert_close(state["exp_avg"], wanted.state[high]["exp_avg"])
    rounded = optimizers.DeepSpeedCPUAdam([own], fp32_optimizer_states=False)
    own.grad = gradient
    rounded.step()
    assert rounded.state[own]["exp_avg"].dtype == torch.bfloat16 == own.dtype


def test_deepspeeds_topology_numbers_ranks_as_triaxs() -> None:
    ours = topology.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    plain = Topology(pipe=2, data=3, tensor=2)
    assert ours.world_size() == 12 and ours.get_axis_names() == ["pipe", "data", "model"]
    for rank in range(12):
        place = ours.get_coord(rank)
        assert (place.pipe, place.data, place.model) == tuple(plain.coordinate(rank))
        assert ours.get_rank(**place._asdict()) == ours.mapping[place] == rank
    assert ours.get_axis_comm_lists("model") == plain.groups("tensor") and ours.get_axis_comm_lists("none") == []
    assert ours.filter_match(pipe=1, data=0) == [6, 7] and ours.get_axis_list("data", 2) == [4, 5, 10, 11]
    assert ours.get_rank_repr(3) == "model_01" and ours.get_rank_repr(3, omit_axes=("model",)) == "pipe_00-data_01"
    assert ours.get_dim("model") == 2 and ours.get_dim("none") == 0
    with pytest.raises(ValueError, match=r"get_rank got 1 of 3 axes: name every axis"):
        ours.get_rank(pipe=0)
    assert topology.PipeDataParallelTopology(num_pp=2, num_dp=4).dims == [2, 4]


def test_fp32_weights_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "Adam", "params": {"lr": LR}}}
    engine, *_ = deepspeed.initialize(model=model().float(), config=config)
    engine.backward(engine(batch(0)).square().mean())
    engine.step()
    engine.save_checkpoint(str(tmp_path), tag="one")
    whole: dict[str, Any] = {n: fragments.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    found = fp32_state_dict.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert found.keys() == whole.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32 and torch.equal(value, whole[name]), name
    fp32_state_dict.convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path), str(tmp_path / "out"), tag="one")
    saved = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in found.items())
    loaded = fp32_state_dict.load_state_dict_from_zero_checkpoint(model().float(), str(tmp_path))
    assert torch.equal(loaded.state_dict()["0.weight"], found["0.weight"])
    with pytest.raises(FileNotFoundError, match=r"give the tag of a checkpoint"):
        fp32_state_dict.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "none")
    with pytest.raises(ValueError, match=r"Unable to find a checkpoint in"):
        fp32_state_dict.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "out"))


def test_converted_checkpoints_store_a_shared_weight_once(tmp_path: Path) -> None:
    """A ``.bin`` file has both names over one storage; safetensors, which cannot share, has the first name alone."""

    def tied() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made[1].weight = made[0].weight
        return made

    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": LR}}}
    engine, *_ = deepspeed.initialize(model=tied(), config=config)
    engine.save_checkpoint(tmp_path)
    for safe in (False, True):
        fp32_state_dict.convert_zero_checkpoint_to_fp32_state_dict(
            str(tmp_path), str(tmp_path), safe_serialization=safe
        )
    state = engine.module.state_dict()
    shared, once = torch.load(tmp_path / "pytorch_model.bin"), load_file(tmp_path / "model.safetensors")
    assert shared["0.weight"].data_ptr() == shared["1.weight"].data_ptr()
    assert shared.keys() == state.keys() == once.keys() | {"1.weight"} and "1.weight" not in once
    assert all(torch.equal(value, state[name]) for found in (shared, once) for name, value in found.items())


def test_the_optimizer_has_deepspeeds_members() -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": LR}}, "fp16": {"enabled": True}}
    engine, optimizer, *_ = deepspeed.initialize(model=model(), config=config)
    assert optimizer.optimizer is engine.data_axis.optimizer and optimizer.dynamic_loss_scale
    scaler = optimizer.loss_scaler
    assert scaler.scale == scaler.cur_scale == scaler.loss_scale == optimizer.cur_scale == 2**16
    assert (scaler.dynamic, scaler.scale_window, scaler.cur_iter) == (True, 1000, 0)
    assert engine.sparse_tensor_module_names == set()
    assert "optimizer" not in optimizer.state_dict()


def test_deepspeeds_utilities_log_and_measure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="triax"):
        utils.log_dist("told", ranks=[0])
        utils.log_dist("not told", ranks=[1])
        utils.log_dist_once("told once")
        utils.log_dist_once("told once")
        utils.see_memory_usage("here", force=True)
    assert caplog.text.count("told") == 2 and "here: " in caplog.text and "GiB" in caplog.text
    with utils.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = nn.Linear(2, 2)
    assert made.weight.is_meta and made.weight.dtype == torch.bfloat16 and nn.Linear(1, 1).weight.dtype == torch.float32
    utils.set_random_seed(3)
    first = torch.rand(2)
    utils.set_random_seed(3)
    assert torch.equal(torch.rand(2), first)
    nest = utils.clone_tensors_for_torch_save({"a": [first, 1]})
    assert torch.equal(nest["a"][0], first) and nest["a"][0].data_ptr() != first.data_ptr()
    assert utils.instrument_w_nvtx(math.sqrt)(4.0) == 2.0 if hasattr(math.sqrt, "__qualname__") else True
    net = model()
    utils.recursive_setattr(net, "0.bias", nn.Parameter(torch.zeros(7)))
    assert not utils.recursive_getattr(net, "0.bias").any()
    assert utils.has_moe_layers(net) == (False, 0)


def test_deepspeed_config_computes_the_batch_sizes() -> None:
    config = configuration.DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": LR}},
            "zero_optimization": {"stage": 2},
        }
    )
    assert config.train_micro_batch_size_per_gpu == 4 and config.optimizer_name == "adam" and config.zero_enabled
    assert config.gradient_clipping == 0.0 and config.scheduler_name is None and config.optimizer_params == {"lr": LR}


def test_monitors_write_files_without_an_engine(tmp_path: Path) -> None:
    from triax.compat.deepspeed import DeepSpeedConfig
    from triax.compat.deepspeed.monitor.config import DeepSpeedMonitorConfig  # type: ignore[import-not-found]
    from triax.compat.deepspeed.monitors import MonitorMaster, csvMonitor

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config: Any = DeepSpeedConfig({"train_batch_size": 2, "csv_monitor": section}).monitor_config
    master = MonitorMaster(config)
    master.write_events([("Train/loss", 0.5, 10)])
    alone = csvMonitor(config.csv_monitor)
    alone.write_events([("Train/loss", 0.25, 20)])
    assert (tmp_path / "job" / "Train_loss.csv").read_text().split() == ["step,loss", "10,0.5", "20,0.25"]
    assert master.enabled and alone.enabled and alone.job_name == "job"
    off = csvMonitor(DeepSpeedMonitorConfig().csv_monitor)
    off.write_events([("a", 1.0, 1)])
    assert not off.enabled and not MonitorMaster(DeepSpeedMonitorConfig()).enabled
