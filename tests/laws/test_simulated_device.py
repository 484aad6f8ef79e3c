"""The laws of the numbers on a simulated accelerator with NCCL's rules (tests/support/simulated_*.py)."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import triax
from triax import LayerSpec, PipelineModule
from triax.models.layers import NextTokenLoss

from laws.option_pairs import FEATURES, Feature, batches, build, joined, pairs, stage_of
from support.five_axes import VOCABULARY, Cell, Found, Job, Place, differences, layers, run
from support.module_training import net
from support.paths import ROOT
from support.training import microbatches, text_batches, tiny_gpt


def on_device(cells: Sequence[Cell]) -> tuple[list[Found], list[str]]:
    """Train cells on the simulated device. Return what they found on the CPU, and the faults."""
    from support.simulated_device import simulated

    with simulated() as device:
        found = run(cells)
        moved = [Found(**{name: tree_map(to_cpu, value) for name, value in _fields(each).items()}) for each in found]
        return moved, device.faults


def _fields(found: Found) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


CELLS = [
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 1, 2, "ring", 3, microbatches=2)),
    (Job(tied=True), Place(2, 1, 1, 1, schedule="zb-v", stage=1, microbatches=4)),
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 2, 2, "ulysses", 2, "1f1b", True, True, 2)),
    (Job(), Place(2, 2, 1, 1, 2, "ring", 3, "interleaved", microbatches=2)),
    (Job(), Place(1, 1, 2, 1, 2, "gather", stage=3, microbatches=2, lend=2)),
]
# What the cells above have beside other things: a pipeline over parts of a sequence, stage 2 and shards of a sequence.
MORE_CELLS = [
    (Job(), Place(1, 2, 1, 1, 2, stage=2, microbatches=4)),
    (Job(), Place(1, 1, 1, 2, sequence_parallel=True, stage=1, microbatches=2)),
    (Job(), Place(1, 2, 1, 1, 2, stage=3, microbatches=2, lend=2)),
    (Job(True, "batch", True, True, True), Place(2, 1, 2, 1, 2, "ulysses", 1, "zb-v", microbatches=2)),
    (Job(True, "batch", True, True, True), Place(1, 1, 2, 2, 2, "gather", 2, "1f1b", True, True, 2)),
]


@pytest.mark.parametrize(
    ("count", "some"),
    [(2, CELLS), (4, CELLS), *(pytest.param(count, MORE_CELLS, marks=pytest.mark.exhaustive) for count in (2, 4))],
)
def test_five_axes_on_the_simulated_device_equal_one_process(ranks: Any, count: int, some: list[Cell]) -> None:
    cells = [cell for cell in some if cell[1].ranks == count]
    everyone = ranks(count, on_device, cells, init_group=False, new_processes=True, timeout=200)
    lines = [
        line for index, cell in enumerate(cells) for line in differences([found[index] for found, *_ in everyone], cell)
    ]
    assert not lines
    assert not [faults for _, faults in everyone if faults]


# Files in which the host waits for the device within a step, and why.
ALWAYS = {
    "grid/agreement/agreement.py": "loss, norm and overflow are read once a step, all together",
    "zero/flat_weights.py": "writes into gathered weights are looked for in the runs 1, 2, 4, 8, ... of a layer",
}
MODULE = {"zero/used_parameters.py": "replicas of a plain module compare which parameters have a gradient, once a step"}
EXPERTS = {
    "moe/dispatch.py": "the host must know how many rows each rank sends",
    "moe/grouped.py": "off CUDA, the products of the experts are cut on the host",
    "engine/auxiliary_steps.py": "auxiliary losses and loads of all layers are read once a step, all together",
}


def waits_of_a_step(stage: Literal[0, 1, 2, 3], kind: str) -> list[str]:
    """Return where the host waits for the device in the fourth step of a run on two ranks."""
    from support.simulated_device import simulated

    with simulated() as device:
        expert = 2 if kind == "lent experts" else 1
        grid = triax.Grid(pipe=2 if kind in ("pipe", "two tensors") else 1, expert=expert, timeout=60)
        options: dict[str, Any] = {
            "zero": triax.Zero(stage=stage),
            "batch": triax.Batch(size=8, microbatch=2),
            "clip": 1.0,
        }
        options["optimizer"] = partial(torch.optim.AdamW, lr=1e-2)
        if kind in COMPRESSIONS:
            options["compression"] = COMPRESSIONS[kind]
        if kind in ("module", "pinned"):
            return waits_of_a_module(triax.Engine(net().to(torch.float32), grid=grid, **options), device, kind)
        if kind == "two tensors":
            model = PipelineModule([LayerSpec(TwoTensors) for _ in range(4)], grid=grid, loss_fn=first_loss)
            engine = triax.Engine(model, **options)
            x = torch.randn(4, 2, 4).to(grid.device)
            for _ in range(4):
                device.waits.clear()
                engine.train_batch(iter([(rows, rows) for rows in x]))
            return list(device.waits)
        if "experts" in kind:
            parts = layers(Job(), Place(lend=2 if kind == "lent experts" else 0))
            model = PipelineModule(parts, grid=grid, loss_fn=NextTokenLoss(grid, VOCABULARY))
        else:
            model = tiny_gpt(grid, dtype=torch.float32, num_hidden_layers=2)
        more: dict[str, Any] = {"recompute": {"interval": 1}} if kind == "recompute" else {}
        more |= {"precision": kind} if kind in ("bf16", "fp16") else {}
        engine = triax.Engine(model, schedule="zb-h1" if kind == "pipe" else "1f1b", **options, **more)
        assert isinstance(engine, triax.PipelineEngine)
        batches = text_batches(VOCABULARY if "experts" in kind else 37, 8, 8, 4)
        data = microbatches(grid, [tuple(part.to(grid.device) for part in batch) for batch in batches], 2)
        for _ in range(4):
            device.waits.clear()
            engine.train_batch(data)
        return list(device.waits)


class TwoTensors(nn.Module):
    """A layer that takes and gives two tensors which require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        first, second = x if isinstance(x, tuple) else (x, x)
        return self.linear(first) + second, self.linear(second)


def first_loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return (outputs[0] - labels).square().mean()


def waits_of_a_module(engine: Any, device: Any, kind: str) -> list[str]:
    x = torch.randn(2, 6)
    x = x.pin_memory() if kind == "pinned" else x.to("sim")
    for _ in range(4):
        device.waits.clear()
        for _ in range(engine.batch.accumulation):
            engine.backward(engine(x).square().mean())
            engine.step()
    return list(device.waits)


COMPRESSIONS = {
    "PowerSGD": triax.gradient_compression.PowerSGD(rank=1, min_compression=1.0),
    "TopK": triax.gradient_compression.TopK(ratio=0.1),
}
KINDS = (
    *("gpt", "recompute", "bf16", "fp16", "pipe", "two tensors", "experts", "lent experts", "module", "pinned"),
    *COMPRESSIONS,
)


# Other kinds have what these do in stage 3: "recompute" the ops of "gpt", "fp16" the casts of "bf16".
OTHERS = ("gpt", "bf16")


def waits_of_steps(stage: Literal[0, 1, 2, 3], kinds: Sequence[str]) -> dict[str, list[str]]:
    return {kind: waits_of_a_step(stage, kind) for kind in kinds if stage < 2 or kind not in COMPRESSIONS}


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        *(pytest.param(stage, KINDS, marks=pytest.mark.exhaustive) for stage in (0, 1, 2)),
        (3, [kind for kind in KINDS if kind not in OTHERS]),
        pytest.param(3, OTHERS, marks=pytest.mark.exhaustive),
    ],
    ids=["0", "1", "2", "3", "3 others"],
)
def test_the_host_waits_for_the_device_once_per_step(ranks: Any, stage: int, kinds: Sequence[str]) -> None:
    for found in ranks(2, waits_of_steps, stage, kinds, init_group=False, new_processes=True, timeout=200):
        for kind, waits in found.items():
            known = {"experts": EXPERTS, "lent experts": EXPERTS, "module": MODULE, "pinned": MODULE}
            reasons = ALWAYS | known.get(kind, {})
            files = [wait.rpartition(" at ")[2].partition(":")[0] for wait in waits]
            assert set(files) <= reasons.keys(), (kind, waits)
            # With experts also before the backward pass, whose auxiliary losses need the weight of the batch; with
            # compression also before the exchange, which must not take an overflow into its residuals.
            twice = "experts" in kind or kind in COMPRESSIONS
            assert files.count("grid/agreement/agreement.py") == 1 + twice, (kind, waits)
            if kind == "lent experts":  # two layers, two microbatches: the numbers of tokens, once
                assert files.count("moe/dispatch.py") == 4, waits


# -------------------------------------------------------------------------- the options of docs/option-pairs.md

Combination = tuple[Feature, ...]
SINGLE = [(feature,) for feature in FEATURES]
# Under autocast the simulated device casts no operation, so that other options meet two dtypes.
EVERY = [*SINGLE, *(pair for pair in pairs() if not any("autocast" in each.name for each in pair))]
PINNED = Feature("pinned", {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}, stages=(2,))
TWICE = ("compression", "OneBitAdam")


def waits_of_options(combinations: Sequence[Combination]) -> list[tuple[Counter[str], int] | str]:
    """Return how often the host waits for the device in which file in the third step, and how many steps were skipped.

    The error in their place, if the options are refused.
    """
    from support.simulated_device import simulated

    found: list[tuple[Counter[str], int] | str] = []
    with simulated() as device:
        for features in combinations:
            options = joined(features)
            assert options is not None
            if "compile" in options:  # torch compiles a function 8 times in a process, and then runs it plainly
                torch.compiler.reset()
            grid = triax.Grid(data=2, timeout=60)
            given: dict[str, Any] = {
                "optimizer": partial(torch.optim.SGD, lr=0.1),
                "batch": triax.Batch(size=8, microbatch=2),
            }
            try:
                given |= options | {"zero": triax.Zero.of({**options["zero"], "stage": stage_of(features)})}
                engine = triax.Engine(build(torch.float32, False, grid), **given)
            except (ValueError, TypeError, NotImplementedError) as error:
                found.append(str(error))
                continue
            rows = [(x.to(grid.device), y.to(grid.device)) for x, y in batches()[0]]
            for _ in range(3):
                device.waits.clear()
                engine.train_batch(iter(rows[2 * grid.data.rank :][:2]))
            waits = Counter(wait.rpartition(" at ")[2].partition(":")[0] for wait in device.waits)
            found.append((waits, engine.skipped_steps))
    return found


@pytest.mark.parametrize(
    "some",
    [
        pytest.param([*(each for each in SINGLE if "offload" in each[0].name), (PINNED,)], id="offload"),
        *(pytest.param(EVERY[n::16], id=f"all {n}", marks=pytest.mark.exhaustive) for n in range(16)),
    ],
)
def test_the_host_waits_only_in_files_that_the_docs_list(ranks: Any, some: list[Combination]) -> None:
    _, _, section = (ROOT / "docs" / "device.md").read_text().partition("## Where the host waits")
    files = set(re.findall(r"`([\w/]+\.py)`", section.partition("\n## ")[0]))
    files.add("pipe/recompute/kept_matmuls.py")  # its dispatch mode runs the operations of others, as a gather's copy
    for found in ranks(2, waits_of_options, some, init_group=False, new_processes=True, timeout=230):
        for features, waits_and_skipped in zip(some, found, strict=True):
            name = " with ".join(each.name for each in features)
            if isinstance(waits_and_skipped, str):
                continue
            waits, skipped = waits_and_skipped
            assert waits.keys() <= files, (name, waits)
            # A step that overflowed is skipped before anything is compressed. (The loss scale is 256.)
            assert skipped <= ("fp16" in name and "OneBitAdam" in name), (name, skipped)
            twice = any(word in name for word in TWICE) and not skipped
            assert waits["grid/agreement/agreement.py"] == 1 + twice, (name, waits)
            if features == (PINNED,):
                assert waits == {"grid/agreement/agreement.py": 1, "zero/offload.py": 1}, waits
