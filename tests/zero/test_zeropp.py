"""ZeRO++: quantized weights and gradients, secondary shards; compared with numpy and with one process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.zero.shard_groups import inner, outer
from triax.zero.zeropp.blocks import BLOCK, pack, packed_bytes, unpack
from triax.zero.zeropp.gradient_reduce import QuantizedReduction
from triax.zero.zeropp.host_groups import equal_runs
from triax.zero.zeropp.options import ZeroPlusPlus

from support.quantized_layers import ALL, HPZ, LAYERS, MICROBATCHES, PLAIN, QGZ, QWZ, STEPS, WIDTH, Layer, made
from support.toys import random_pair, summed_loss
from support.training import small_config

Array = NDArray[Any]


def quantized(x: Array, bits: int) -> Array:
    """Return rows of floats after ``pack`` and ``unpack``, computed by the definition, block by block."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    most, out = wide(2 ** (bits - 1) - 1), np.empty(x.shape, wide)
    for start in range(0, x.shape[-1], BLOCK):
        block = x[..., start : start + BLOCK].astype(wide)
        scale = np.abs(block).max(-1, keepdims=True) / most
        with np.errstate(all="ignore"):
            found = np.rint(np.multiply(block, wide(1) / scale)) * scale
        found[np.broadcast_to(scale < np.finfo(wide).tiny, found.shape)] = 0
        found[np.broadcast_to(~np.isfinite(scale), found.shape)] = np.nan
        out[..., start : start + BLOCK] = found
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_pack_and_unpack_follow_the_definition_by_blocks(bits: int, dtype: torch.dtype) -> None:
    """Rows of any length, with zeros, and with values that no integer represents."""
    generator = torch.Generator().manual_seed(1)
    most = 2 ** (bits - 1) - 1
    for numel in (0, 1, 2, 15, 255, 256, 257, 777, 1024):
        x = torch.randn(3, numel, generator=generator, dtype=torch.float64).to(dtype)
        x[:, 256:512] = 0  # a block of nothing
        packed = pack(x, bits)
        scale = 8 if dtype == torch.float64 else 4
        least = math.ceil(numel / BLOCK) * scale + math.ceil(numel * bits / 8)
        assert packed.dtype == torch.uint8 and packed.shape == (3, packed_bytes(numel, bits, dtype))
        assert least <= packed.shape[1] < least + scale
        y = unpack(packed, numel, bits, dtype)
        wide = (x if dtype == torch.float64 else x.float()).numpy()
        assert np.array_equal(y.numpy(), quantized(wide, bits))
        into = torch.empty(3, numel, dtype=dtype)
        assert torch.equal(unpack(packed, numel, bits, dtype, into), y.to(dtype))
        if numel:
            step = x[:, :BLOCK].double().abs().amax(1, keepdim=True) / most
            assert ((y - x).double().abs()[:, :BLOCK] <= 0.5001 * step).all()
    spread = torch.randn(2, 3, 300, generator=generator, dtype=torch.float64).to(dtype)
    assert torch.equal(pack(spread.transpose(0, 1), bits), pack(spread.transpose(0, 1).contiguous(), bits))


@pytest.mark.parametrize("bits", [8, 4])
def test_an_infinity_or_nan_makes_its_quantized_block_nan(bits: int) -> None:
    """An infinity or a NaN makes its block NaN, and leaves the others alone; tiny blocks are zeros."""
    for odd in (math.inf, -math.inf, math.nan):
        x = torch.ones(3 * BLOCK)
        x[BLOCK + 7] = odd
        y = unpack(pack(x, bits), x.numel(), bits, x.dtype)
        assert y[BLOCK : 2 * BLOCK].isnan().all()
        assert torch.equal(y[:BLOCK], x[:BLOCK]) and torch.equal(y[2 * BLOCK :], x[2 * BLOCK :])
    for value, back in ((3e38, 3e38), (1e-30, 1e-30), (1e-40, 0.0), (0.0, 0.0)):
        x = torch.full((BLOCK,), value)
        torch.testing.assert_close(unpack(pack(x, bits), BLOCK, bits, x.dtype), torch.full((BLOCK,), back))


def test_zeropp_quantizes_the_weights_that_its_options_choose() -> None:
    frozen = ZeroPlusPlus(frozen=True)
    assert ZeroPlusPlus(weights=True).quantizes(torch.float32, True) and ZeroPlusPlus(weights=True).quantizes(
        torch.bfloat16, False
    )
    assert frozen.quantizes(torch.float16, False) and not frozen.quantizes(torch.float16, True)
    assert not any(frozen.quantizes(dtype, False) for dtype in (torch.int8, torch.complex64, torch.float8_e4m3fn))


def test_equal_runs_counts_neighboring_ranks_of_a_host() -> None:
    two = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert equal_runs(list("aabbaabb"), two) == 2
    assert equal_runs(list("aaaabbbb"), two) == 4  # a host each: one hop
    assert equal_runs(list("abababab"), two) == 1
    assert equal_runs(list("aabbcdcd"), two) == 1
    assert equal_runs(list("aaabaabb"), two) == 1
    with pytest.raises(ValueError, match=r"6 replicas do not fall into groups of 4: give one of 1, 2, 3, 6"):
        ZeroPlusPlus(secondary=4).check(6)


def gradients_of(replicas: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    made = torch.randn(replicas, numel, generator=generator, dtype=torch.float64)
    return (made * torch.logspace(-6, 6, numel, dtype=torch.float64)).to(dtype)


def reduced_over(numel: int) -> list[tuple[Tensor, dict[str, float]]]:
    """Return this rank's range of the sum, in one hop and in two, in fp32 and in float64; and the bytes sent."""
    grid, found = Grid(timeout=60), []
    hops: list[tuple[Any, Any]] = [(None, None)]
    if grid.data.size == 4:
        hops.append((inner(grid, 2, " reduce"), outer(grid, 2, " reduce")))
    for within, between in hops:
        for dtype in (torch.float32, torch.float64):
            axis = QuantizedReduction(grid.data, within, between)
            mine = gradients_of(grid.data.size, numel, dtype)[grid.data.rank].clone()
            grid.traffic.clear()
            output = mine.view(grid.data.size, -1)[grid.data.rank]  # in place, as in stage 1
            axis.reduce_scatter(output, mine, async_op=True).wait()
            sent = {name: sum(k.bytes for k in kinds.values()) for name, kinds in grid.traffic.report().items()}
            assert sent == axis.sent(numel, dtype)
            found.append((output.clone(), sent))
    return found


def sums(gradients: Array, host: int) -> Array:
    """Return each owner's sum, (N, n), of gradients (replica, owner of the range, n)."""
    replicas, _, numel = gradients.shape
    if host == 1:
        host = replicas
    hosts = replicas // host
    part = np.empty((hosts, host, hosts, numel), gradients.dtype)
    for h, at, k in np.ndindex(hosts, host, hosts):
        own, owner = h * host + at, k * host + at
        others = [quantized(gradients[h * host + j, owner], 4) for j in range(host) if j != at]
        part[h, at, k] = gradients[own, owner] + sum(others)
    out = np.empty((replicas, numel), gradients.dtype)
    for k, at in np.ndindex(hosts, host):
        out[k * host + at] = part[k, at, k] + sum(quantized(part[h, at, k], 4) for h in range(hosts) if h != k)
    return out


@pytest.mark.parametrize("replicas", [2, 4])
def test_quantized_reductions_equal_numpy_in_one_and_two_hops(ranks: Any, replicas: int) -> None:
    numel = 600 * replicas
    exact = gradients_of(replicas, numel, torch.float64).sum(0)
    for rank, found in enumerate(ranks(replicas, reduced_over, numel)):
        for (output, sent), (host, dtype) in zip(
            found, [(h, d) for h in (1, 2) for d in (torch.float32, torch.float64)]
        ):
            whole = gradients_of(replicas, numel, dtype).view(replicas, replicas, -1)
            wanted = torch.from_numpy(sums(whole.numpy(), host)[rank])
            bound = 1e-13 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(output, wanted, rtol=bound, atol=bound * float(wanted.abs().max()))
            mine = exact.view(replicas, -1)[rank]
            assert 0 < (output - mine).norm() / mine.norm() < 0.2  # 4 bits: near, and not it
            row = packed_bytes(numel // replicas, 4, dtype)
            assert sent == (
                {"data": (replicas - 1) * row} if host == 1 else {"data within": 2 * row, "data between": row}
            )


def batch(replicas: int) -> tuple[Tensor, Tensor]:
    return random_pair(3, MICROBATCHES * replicas, 3, WIDTH)


def data(grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = batch(grid.data.size)
    while True:
        for i in range(grid.data.rank * MICROBATCHES, (grid.data.rank + 1) * MICROBATCHES):
            yield x[i : i + 1], y[i : i + 1]


def trained(shape: tuple[int, int, int], cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> Any:
    """Return, for each case, weights and gradients after some steps, the last forward's weights, and reports."""
    found = []
    for zero, config in cases:
        grid = Grid(*shape, timeout=60)
        engine, batches = made(grid, zero, **config), data(grid)
        seen: dict[str, Tensor] = {}
        for name, layer in engine.module.layers.items():
            layer.register_forward_pre_hook(
                lambda layer, _, name=name, seen=seen: seen.update({name: layer.linear.weight.detach().clone()})
            )
        for step in range(STEPS):
            engine.record_timeline = step == STEPS - 1
            engine.train_batch(batches)
            if step == 0:
                engine.eval_batch(batches)  # gathers too, and what that keeps is not old
        assert engine.timeline is not None
        names = {flight.name for flight in engine.timeline.collectives[grid.pipe.rank]}
        assert ("all_to_all" in names) == bool(zero.get(QGZ))
        layout = [
            (bucket.flat.numel, [(m.layout.name, s.start, s.stop) for m, s in zip(bucket.members, bucket.flat.slots)])
            for bucket in engine.data_axis.buckets
        ]
        reports = engine.traffic_report(), engine.memory_report()
        found.append((engine.gather(), engine.gather("gradients"), seen, layout, *reports))
    return found


def simulated(layout: Any, replicas: int, zero: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the steps in one process: N replicas one after the other, with quantized weights and gradients."""
    model = PipelineModule([LayerSpec(Layer) for _ in range(LAYERS)], dtype=torch.float64)
    seen = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in seen.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01)
    (x, y), host = batch(replicas), zero.get("zero_hpz_partition_size", 1)
    for _ in range(STEPS):
        for numel, slots in layout:
            flat = torch.zeros(numel, dtype=torch.float64)
            for name, start, stop in slots:
                flat[start:stop] = masters[name].detach().view(-1)
            if zero.get("zero_quantized_weights"):
                flat = torch.from_numpy(quantized(flat.view(replicas, -1).numpy(), 8)).view(-1)
            for name, start, stop in slots:
                seen[name].data.copy_(flat[start:stop].view(seen[name].shape))
        totals = [np.zeros((replicas, numel // replicas)) for numel, _ in layout]
        whole = [np.zeros((replicas, replicas, numel // replicas)) for numel, _ in layout]  # stage 1: reduced once
        for at in range(MICROBATCHES):
            each = []
            for replica in range(replicas):
                i = replica * MICROBATCHES + at
                value, _ = summed_loss(model(x[i : i + 1]), y[i : i + 1])
                each.append(dict(zip(seen, torch.autograd.grad(value, [*seen.values()]), strict=True)))
            for total, once, (numel, slots) in zip(totals, whole, layout, strict=True):
                flats = torch.zeros(replicas, numel, dtype=torch.float64)
                for replica, name, start, stop in ((r, *slot) for r in range(replicas) for slot in slots):
                    flats[replica, start:stop] = each[replica][name].view(-1)
                once += flats.view(replicas, replicas, -1).numpy()
                if zero["stage"] > 1 or at == MICROBATCHES - 1:
                    total += sums(once, host) if zero.get("zero_quantized_gradients") else once.sum(0)
                    once[:] = 0
        for total, (_, slots) in zip(totals, layout, strict=True):
            flat = torch.from_numpy(total).view(-1) / y.numel()
            for name, start, stop in slots:
                masters[name].grad = flat[start:stop].view(masters[name].shape).clone()
        optimizer.step()
    gradients = {name: p.grad.clone() for name, p in masters.items() if p.grad is not None}
    return {name: p.detach() for name, p in masters.items()}, gradients


_WHOLE = "stage3_param_persistence_threshold"
_NVME = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
_WAYS: list[tuple[tuple[int, int, int], list[tuple[dict[str, Any], dict[str, Any]]]]] = [
    ((1, 2, 1), [({**PLAIN, QWZ: True}, {}), (ALL, {}), ({"stage": 1, QGZ: True}, {}), ({"stage": 2, QGZ: True}, {})]),
    ((1, 2, 1), [({**ALL, "offload_param": _NVME}, {}), ({**ALL, HPZ: 2, "offload_optimizer": _NVME}, {})]),
    ((1, 4, 1), [({**ALL, HPZ: 2}, {})]),
    ((2, 2, 1), [(ALL, {"pipeline": {"schedule": "zb-h1"}})]),
]
_MORE_WAYS: list[tuple[tuple[int, int, int], list[tuple[dict[str, Any], dict[str, Any]]]]] = [
    ((1, 4, 1), [(ALL, {})]),
    ((2, 2, 1), [(ALL, {})]),
]


@pytest.mark.parametrize(
    ("shape", "cases"),
    [*_WAYS, *(pytest.param(*way, marks=pytest.mark.exhaustive) for way in _MORE_WAYS)],
    ids=["2", "2 offloaded", "4", "2x2", "4 alone", "2x2 in 1f1b"],
)
def test_zeropp_steps_equal_one_process_that_quantizes(ranks: Any, shape: Any, cases: Any) -> None:
    """Compare in float64 to 1e-10: weights, equal on all replicas; masters, never rounded; reduced gradients."""
    every = ranks(math.prod(shape), trained, shape, cases)
    for at, (zero, _) in enumerate(cases):
        layout = [bucket for found in every[:: shape[1]] for bucket in found[at][3]]
        if zero["stage"] < 3:
            layout = every[0][at][3]
        weights, gradients = simulated(layout, shape[1], zero)
        for rank, found in enumerate(every):
            got, steps, seen, *_ = found[at]
            torch.testing.assert_close(got, weights, rtol=1e-10, atol=1e-13)
            torch.testing.assert_close(steps, gradients, rtol=1e-10, atol=1e-13)
            first = every[rank // shape[1] * shape[1]][at][2]  # the first replica of this stage
            assert seen.keys() == first.keys() and all(torch.equal(seen[name], first[name]) for name in seen)
            if zero.get(QWZ) and "0" in seen:
                assert not torch.equal(seen["0"], got["layers.0.linear.weight"])


def test_secondary_shards_change_no_weight_or_gradient(ranks: Any) -> None:
    """hpZ alone changes no number, also with all layers recomputed."""
    again = {"activation_checkpointing": {"interval": 1}}
    cases = [(PLAIN, {}), ({**PLAIN, HPZ: 2}, {}), ({**PLAIN, HPZ: 4}, {}), (PLAIN, again), ({**PLAIN, HPZ: 2}, again)]
    for found in ranks(4, trained, (1, 4, 1), cases):
        for one in found[1:]:
            for mine, theirs in zip(one[:3], found[0][:3], strict=True):
                assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
        gathers = [one[4]["sent"]["data"]["all_gather"]["calls"] for one in found]
        assert gathers[0] > LAYERS and gathers[1] == gathers[2] == gathers[4] == LAYERS  # one a step and layer


SIDE, DEEP = 64, 4
WEIGHTS = DEEP * SIDE * SIDE  # of fp32; no bias: a multiple of every padding


def accounted(zero: dict[str, Any], config: dict[str, Any], frozen: bool = False) -> Any:
    grid = Grid(timeout=60)
    layers = [LayerSpec(nn.Linear, SIDE, SIDE, bias=False) for _ in range(DEEP)]
    model = PipelineModule(layers, grid=grid, loss_fn=lambda o, y: (o - y).float().square().mean())
    if frozen:
        model.layers["1"].weight.requires_grad_(False)
    base = small_config("AdamW", micro=2, accumulation=3, zero={"stage": 3, **zero})
    engine, *_ = triax.initialize(model=model, config={**base, **config})

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(2, SIDE), torch.randn(2, SIDE)

    for _ in range(2):
        engine.train_batch(batches())
    return engine.traffic_report(), engine.memory_report()


def test_zeropp_bytes_sent_equal_the_count_by_hand(ranks: Any) -> None:
    """Compare the bytes of a step of 3 microbatches on 4 replicas in fp32, computed by hand, with count and formula."""
    m, n, layer = 3, WEIGHTS // 4, SIDE * SIDE // 4  # microbatches; a shard; a layer's shard
    gathers = 2 * m * DEEP - (m - 1)  # the first layer stays whole from a backward pass to the next forward
    eight, four = packed_bytes(layer, 8, torch.float32), packed_bytes(layer, 4, torch.float32)
    assert (eight, four) == (layer + 4 * layer // BLOCK, layer // 2 + 4 * layer // BLOCK)
    whole = 4 * layer
    cases: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({QWZ: True}, {"data": 3 * (gathers * eight + m * DEEP * whole)}),
        ({QGZ: True}, {"data": 3 * (gathers * whole + m * DEEP * four)}),
        ({QWZ: True, _WHOLE: 10**6}, {"data": 3 * (DEEP * whole + m * DEEP * whole)}),  # published, and not rounded
        ({HPZ: 2}, {"data": 3 * (DEEP * whole + m * DEEP * whole), "data within": 2 * (gathers - DEEP) * whole}),
        (
            {QWZ: True, QGZ: True, HPZ: 2},
            {
                "data": 3 * DEEP * eight,
                "data within": 2 * (gathers - DEEP) * eight + m * DEEP * 2 * four,
                "data between": m * DEEP * four,
            },
        ),
    ]
    for zero, wanted in cases:
        for traffic, memory in ranks(4, accounted, zero, {}):
            sent, formula = traffic["sent"], dict(traffic["formula"])
            axes = {axis: sum(kind["bytes"] for kind in sent[axis].values()) for axis in sent if "data" in axis}
            assert axes == wanted, zero
            saved = 0 if _WHOLE in zero else (m - 1) * (eight if QWZ in zero else whole)
            name, share = ("data within", 2) if HPZ in zero else ("data", 3)
            assert {**axes, name: axes[name] + share * saved} == formula, zero
            assert traffic["uncompressed"]["data"] == (m + 1 if _WHOLE in zero else 3 * m) * 3 * 4 * n
            assert memory["held"].get("secondary") == (
                DEEP * 2 * (eight if QWZ in zero else whole) if HPZ in zero else None
            )
            assert memory["formula"].get("secondary") == memory["held"].get("secondary")
            if _WHOLE not in zero:
                assert memory["held"]["parameters"] == memory["formula"]["parameters"] == 4 * n


def test_frozen_weights_can_be_sent_in_8_bits_alone(ranks: Any) -> None:
    layer = SIDE * SIDE // 4
    for key in ("zero_quantized_nontrainable_weights", QWZ):
        eight, whole = packed_bytes(layer, 8, torch.bfloat16), 2 * layer
        for traffic, _ in ranks(2, accounted, {key: True}, {"bf16": {"enabled": True}}, frozen=True):
            gather = traffic["sent"]["data"]["all_gather"]
            calls = 2 * 3 * DEEP - 2
            assert gather["calls"] == calls
            narrow = calls if key == QWZ else 2 * 3  # the frozen layer's
            eight = packed_bytes(2 * layer, 8, torch.bfloat16)
            assert gather["bytes"] == narrow * eight + (calls - narrow) * 2 * whole
