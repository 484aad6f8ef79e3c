"""A layer of experts equals a loop over its tokens, on every grid: outputs, losses, loads and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triax.context.order import positions, shard
from triax.grid import Grid, layout_of
from triax.grid.randomness.random import seeded
from triax.moe import MoE, grouped
from triax.moe.experts import clamped_swiglu
from triax.moe.router import Router

from support.moe_reference import reference
from support.paths import ROOT
from support.readme_blocks import programs

B, T, D, E, K, W = 4, 8, 6, 4, 2, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "sequence": {},
    "capacity": {"capacity": 0.75, "z_loss": 0.02, "expert": "gelu"},
    "batch": {"balance": "batch", "z_loss": 0.02, "normalize": False, "expert": "relu"},
    "bias": {"balance": ("bias", "sequence"), "router": "sigmoid", "scale": 1.5, "groups": 2, "groups_limit": 1},
    "shared": {
        "balance": None,
        "shared_experts": 2,
        "shared_gate": True,
        "capacity": 1.0,
        "groups": 4,
        "groups_limit": 3,
    },
    "microbatch": {"balance": "microbatch", "expert": "geglu"},
    "weighed": {"router": "sigmoid", "normalize": False, "weigh_inputs": True, "shared_experts": 1},
    "biased": {"bias": True, "expert": clamped_swiglu(0.3, 1.3)},
}
PADDED = ("capacity", "shared", "batch")  # with padding
PLAIN = {"data": 1, "context": 1, "tensor": 1, "expert": 1}
# Sizes of the axes that are not 1, and the options of the layer that go with them. The first few run by default.
FEW = {1: 1, 2: 6, 4: 6}
GRIDS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"data": 2, "expert": 2},
        {"context": 2, "expert": 2},
        {"data": 2, "expert": 2, "lend": 1},
        {"context": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"tensor": 2, "shard_tensor": True},
        {"tensor": 2, "shard_tensor": True, "sequence_parallel": True},
        {"tensor": 2},
        {"data": 2},
    ],
    4: [
        {"context": 4, "expert": 4},
        {"data": 2, "context": 2, "expert": 2},
        {"context": 4, "expert": 4, "lend": 2},
        {"data": 2, "expert": 2, "tensor": 2, "sequence_parallel": True},
        {"context": 2, "expert": 2, "tensor": 2, "sequence_parallel": True, "shard_tensor": True},
        {"data": 2, "expert": 2, "tensor": 2, "shard_tensor": True},
        {"data": 4, "expert": 4},
        {"data": 4, "expert": 2},
        {"data": 2, "context": 2, "expert": 4},
        {"context": 2, "expert": 2, "tensor": 2, "sequence_parallel": True},
        {"context": 2, "tensor": 2, "sequence_parallel": True},
        {"context": 2, "expert": 2, "tensor": 2, "sequence_parallel": True, "lend": 2},
        {"data": 2, "expert": 2, "tensor": 2, "shard_tensor": True, "lend": 2},
    ],
}
BIAS = torch.tensor([0.1, -0.2, 0.05, 0.0])
PAST = torch.tensor([10, 3, 0, 7])


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padding() -> Tensor:
    valid = torch.ones(B, T, dtype=torch.bool)
    valid[0, 5:] = valid[2, 1:3] = valid[3] = False
    return valid


def build(grid: Grid, options: dict[str, Any], **others: Any) -> MoE:
    with seeded(1, "layer"):
        layer = MoE(D, E, K, grid=grid, width=W, dtype=torch.float64, **options, **others)
    with torch.no_grad():
        for seed, (name, bias) in enumerate(layer.named_parameters()):
            if name.endswith("bias"):
                layout, place = layout_of(bias), (grid.expert.rank, grid.expert.size)
                bias.copy_(layout.shard(numbers(*layout.shape, seed=seed), grid.tensor.rank, grid.tensor.size, place))
    if layer.router.correction_bias is not None:
        layer.router.correction_bias.copy_(BIAS)
    if layer.past_loads is not None:
        layer.past_loads.copy_(PAST)
    return layer


def place(grid: Grid, sequence_parallel: bool) -> tuple[list[int], Tensor]:
    """This rank's samples and positions: zigzag over context, then contiguous over tensor."""
    samples = list(range(B))[grid.data.rank * B // grid.data.size :][: B // grid.data.size]
    chunks = torch.arange(T).chunk(2 * grid.context.size)
    mine = torch.cat([chunks[grid.context.rank], chunks[2 * grid.context.size - 1 - grid.context.rank]])
    if sequence_parallel:
        mine = mine.chunk(grid.tensor.size)[grid.tensor.rank]
    return samples, mine


def run_on_rank(cases: list[dict[str, Any]], both: bool = False) -> list[dict[Any, Any]]:
    found = []
    for turn, case in enumerate(cases):
        sizes = {axis: case.get(axis, 1) for axis in PLAIN}
        others = {key: value for key, value in case.items() if key not in PLAIN}
        grid, results = Grid(**sizes), {}
        grid.traffic.clear()
        every = both or len(cases) == 1
        for name, options in OPTIONS.items() if every else [*OPTIONS.items()][turn % 2 :: 2]:
            for padded in (False, True) if both else (name in PADDED,):
                results[name, padded] = step(grid, options, others, padded)
        if grid.size == 1:
            assert not grid.traffic.report()
        found.append(results)
    return found


def step(grid: Grid, options: dict[str, Any], others: dict[str, Any], padded: bool) -> dict[str, Any]:
    """One batch in microbatches: this rank's outputs, and the gradients summed over the replicas."""
    layer = build(grid, options, **others)
    layer.auxiliary.weight, layer.auxiliary.scale = 1 / B, 3.0
    samples, places = place(grid, others.get("sequence_parallel", False))
    x, dy = numbers(B, T, D, seed=2), numbers(B, T, D, seed=3)
    valid = padding() if padded else None
    outs, dxs = [], []
    micro = 2 if len(samples) > 1 else 1
    for rows in torch.tensor(samples).chunk(micro):
        own = x[rows][:, places].requires_grad_()
        y = layer(own, None if valid is None else valid[rows][:, places], places)
        (3.0 * y * dy[rows][:, places]).sum().backward()
        outs.append(y.detach())
        assert own.grad is not None
        dxs.append(own.grad)
    gradients = {}
    for name, parameter in layer.named_parameters():
        layout = layout_of(parameter)
        assert parameter.grad is not None  # also of an expert without tokens
        grid.axis(layout.replicas).all_reduce(parameter.grad)
        if layout.partial:
            grid.tensor.all_reduce(parameter.grad)
        gradients[name] = layout.gather(grid.tensor, parameter.grad, grid.expert)
    totals = torch.zeros(E + 2, dtype=torch.float64)
    if layer.loads is not None:
        totals[:E] = layer.loads
    for index, name in enumerate(layer.loss_names):
        if name in layer.auxiliary.values:
            totals[E + index] = B * layer.auxiliary.values[name]
    grid.data_context.all_reduce(totals)
    grid.tensor.all_reduce(totals)
    return {
        "place": (samples, places),
        "y": torch.cat(outs),
        "dx": torch.cat(dxs),
        "gradients": gradients,
        "loads": totals[:E],
        "losses": dict(zip(layer.loss_names, totals[E:].tolist())),
    }


@pytest.fixture(scope="module")
def expected() -> Any:
    """What the loops over tokens give, for each option: made once."""
    made: dict[Any, Any] = {}

    def get(name: str, padded: bool, microbatches: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
        options = OPTIONS[name]
        key = name, padded, microbatches if name == "microbatch" else ()
        if key not in made:
            layer = build(Grid(), options)
            weights = {n: p.detach().requires_grad_() for n, p in layer.named_parameters()}
            x = numbers(B, T, D, seed=2).requires_grad_()
            y, losses, loads = reference(
                *(x, weights, options, K),
                valid=padding() if padded else None,
                bias=None if layer.router.correction_bias is None else BIAS,
                past=PAST,
                microbatches=[list(each) for each in microbatches],
            )
            total = (y * numbers(B, T, D, seed=3)).sum()
            for loss, factor in (("balance", 0.01), ("z_loss", options.get("z_loss", 0.0))):
                if loss in losses:
                    total = total + factor * losses[loss] / B
            total.backward()
            made[key] = {
                "y": y.detach(),
                "dx": x.grad,
                "gradients": {n: w.grad for n, w in weights.items()},
                "loads": loads,
                "losses": {n: float(loss.detach()) for n, loss in losses.items()},
            }
        return made[key]

    return get


@pytest.mark.parametrize("size", list(GRIDS))
def test_a_moe_layer_equals_a_loop_over_tokens(ranks: Any, expected: Any, size: int) -> None:
    """Each grid with every second layer, from one grid to the next the others."""
    require_equal_to_loops(GRIDS[size][: FEW[size]], ranks(size, run_on_rank, GRIDS[size][: FEW[size]]), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", list(GRIDS))
def test_a_moe_layer_equals_a_loop_on_every_grid_and_padding(ranks: Any, expected: Any, size: int) -> None:
    require_equal_to_loops(GRIDS[size], ranks(size, run_on_rank, GRIDS[size], True), expected)


def require_equal_to_loops(cases: list[dict[str, Any]], every: list[list[dict[Any, Any]]], expected: Any) -> None:
    for index, case in enumerate(cases):
        for rank, found in enumerate(results[index] for results in every):
            for (name, padded), got in found.items():
                what = f"{case}, {name}, padded={padded}, rank {rank}"
                samples, places = got["place"]
                each = B // case.get("data", 1)
                micro = max(1, each // 2)
                wanted = expected(name, padded, tuple(tuple(range(i, i + micro)) for i in range(0, B, micro)))
                rows = torch.tensor(samples)
                assert_close(got["y"], wanted["y"][rows][:, places], what)
                assert_close(got["dx"] / 3.0, wanted["dx"][rows][:, places], f"{what}, dx")
                assert got["gradients"].keys() == wanted["gradients"].keys()
                for weight, gradient in got["gradients"].items():
                    assert_close(gradient / 3.0, wanted["gradients"][weight], f"{what}, {weight}")
                assert got["loads"].tolist() == wanted["loads"].tolist(), what
                assert got["losses"] == pytest.approx(wanted["losses"], abs=1e-10), what


def assert_close(got: Tensor, wanted: Tensor, what: str) -> None:
    assert got.shape == wanted.shape, what
    assert float((got - wanted).abs().max()) < 1e-10, what


def odd_length(options: dict[str, Any], sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradient of sequences that context ranks cannot share evenly, and the loads."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    tensor = 2 if sequence_parallel else 1
    grid = Grid(context=size // tensor if size > 1 else 1, expert=2 if size > 1 else 1, tensor=tensor)
    layer = build(grid, options, sequence_parallel=sequence_parallel)
    layer.auxiliary.weight = 1 / B
    x = numbers(B, 7, D, seed=5).requires_grad_()
    part, places = shard(x, grid.context, multiple=tensor), positions(7, grid.context.size, grid.context.rank, tensor)
    if sequence_parallel:
        part, places = part.chunk(tensor, 1)[grid.tensor.rank], places.chunk(tensor)[grid.tensor.rank]
    y = layer(part, (places < 7).expand(B, -1) if size > 1 else None, places)
    y.square().sum().backward()
    assert x.grad is not None and layer.loads is not None
    whole, loads = torch.zeros(B, 8 * tensor, D, dtype=torch.float64), layer.loads
    whole[:, places] = y.detach()
    for axis in (grid.context, grid.tensor):
        for each in (whole, x.grad, loads):
            axis.all_reduce(each)
    assert not whole[:, 7:].any()
    return whole[:, :7], x.grad, loads


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, False), (4, True)])
def test_padded_sequence_lengths_compute_as_on_one_process(ranks: Any, size: int, sequence_parallel: bool) -> None:
    options = {"capacity": 0.8, "z_loss": 0.1}
    wanted = odd_length(options, False)
    for found in ranks(size, odd_length, options, sequence_parallel):
        for got, want in zip(found, wanted, strict=True):
            assert_close(got, want, f"{size}")


def bytes_on_rank() -> tuple[dict[str, Any], float, float]:
    grid = Grid(data=4, expert=4)
    layer = build(grid, {"balance": None})
    x = numbers(B, T, D, seed=grid.rank).requires_grad_()
    grid.traffic.clear()
    y = layer(x)
    forward = grid.traffic.bytes("expert", "all_to_all")
    y.sum().backward()
    backward = grid.traffic.bytes("expert", "all_to_all") - forward
    chosen = layer.router(x).experts
    return {"away": int((chosen != grid.rank).sum()), "all": grid.traffic.report()}, forward, backward


def test_dispatch_sends_each_token_once_to_each_of_its_experts(ranks: Any) -> None:
    every = ranks(4, bytes_on_rank)
    # Rank r holds expert r. Rows of D float64 leave this rank for experts elsewhere, and come back from here to others.
    total = sum(found["away"] for found, _, _ in every)
    assert sum(forward for _, forward, _ in every) == 2 * total * D * 8 + 4 * 3 * 8  # with the counts
    assert sum(backward for _, _, backward in every) == 2 * total * D * 8
    assert all(set(found["all"]) == {"expert"} for found, _, _ in every)


def test_the_program_of_the_moe_page_reports_the_balance(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs((ROOT / "docs" / "moe.md").read_text()).values()
    exec(compile(program, "docs/moe.md", "exec"), {"__name__": "__main__"})
    assert "layers.0.moe.balance" in capsys.readouterr().out


def test_torchs_grouped_kernel_equals_a_loop_over_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = MoE(8, 5, 2, grid=Grid(), width=16, balance=None), torch.randn(1, 6, 8, requires_grad=True)
    layer.router.weight.data[3] = -layer.router.weight.data[2]  # an expert may be without tokens

    def gradients() -> list[Tensor]:
        layer(x).square().sum().backward()
        found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        layer.zero_grad()
        x.grad = None
        return [each.clone() for each in found if each is not None]

    loops = gradients()
    monkeypatch.setattr(grouped, "_has_kernel", lambda rows, *lengths: True)
    for kernel, loop in zip(gradients(), loops, strict=True):
        torch.testing.assert_close(kernel, loop)


def ties() -> tuple[Tensor, dict[str, Tensor]]:
    """A router that gives all experts equal scores: the first K take all tokens, and the others' ranks get no row."""
    grid = Grid(expert=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    layer = build(grid, {"balance": "bias", "router": "sigmoid", "groups": 4, "groups_limit": 3})
    assert layer.router.correction_bias is not None
    layer.router.weight.data.zero_()
    layer.router.correction_bias.zero_()
    x = numbers(B, T, D, seed=2).requires_grad_()
    layer(x).sum().backward()
    found = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None  # also where no token came
        found[name] = layout_of(parameter).gather(grid.tensor, parameter.grad, grid.expert)
    return layer.router(x).experts, found


def test_equal_scores_choose_the_expert_with_the_lowest_number(ranks: Any) -> None:
    chosen, wanted = ties()
    assert (chosen == torch.arange(K)).all()
    assert not wanted["routed.down"][K:].any() and wanted["routed.down"][:K].any()
    for got, gradients in ranks(2, ties):
        assert torch.equal(got, chosen)
        for name in ("routed.gate_up", "routed.down"):  # each rank has the same tokens here
            assert_close(gradients[name], 2 * wanted[name], name)


def routed_alike() -> tuple[Tensor, Tensor]:
    grid = Grid(tensor=2)
    torch.manual_seed(0)
    layer = MoE(8, 4, 1, grid=grid, width=4, shard_tensor=True, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight[1:3] = layer.router.weight[0]  # three experts with equal scores,
        layer.router.weight[1] *= 1 + grid.tensor.rank * 1e-15  # but for the last bit on the second rank
    y = layer(torch.randn(1, 64, 8, dtype=torch.float64))
    return y.detach(), layer.router(torch.randn(1, 64, 8, dtype=torch.float64)).experts


def test_tensor_parallel_ranks_choose_the_same_experts(ranks: Any) -> None:
    (outputs, experts), (outputs_of_second, experts_of_second) = ranks(2, routed_alike)
    assert torch.equal(experts, experts_of_second)
    torch.testing.assert_close(outputs, outputs_of_second, rtol=1e-12, atol=1e-12)


def test_a_router_in_bf16_keeps_its_selection_bias_in_fp32() -> None:
    """The steps of the bias are smaller than bf16's."""
    router = Router(8, 4, 2, kind="sigmoid")
    assert router.correction_bias is not None
    wanted = router.correction_bias.copy_(torch.tensor([0.001, -1.001, 0.5, 3.0001])).clone()
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16 and torch.equal(router.correction_bias, wanted)
