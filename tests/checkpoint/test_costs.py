"""Costs of a checkpoint: bytes on the disk, and host memory while one is written asynchronously."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax.base.safetensors import ByteRange
from triax.checkpoint.format.index import read_index
from triax.checkpoint.format.mapped_files import MappedFiles

from support.resident import own_pages, status

KINDS = ("weights/", "optimizer/")


def engine(width: int, stage: int, half: str = "", **section: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "checkpoint": section,
        **({half: {"enabled": True, **({"initial_scale_power": 4} if half == "fp16" else {})}} if half else {}),
    }
    return triax.initialize(model=model, config=config)[0]


def step(trained: Any, width: int) -> None:
    weight = next(trained.module.parameters())
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(trained.grid.rank)).to(weight.dtype)
    trained.backward(trained(x).float().square().mean())
    trained.step()


def written(folder: str, half: str, stages: list[int]) -> int:
    for stage in stages:
        trained = engine(10, stage, half)
        step(trained, 10)
        assert trained.save_checkpoint(folder, f"{stage}") and trained.skipped_steps == 0
    return sum(weight.numel() for weight in trained.gather().values())


@pytest.mark.parametrize("half", ["", "bf16", "fp16"])
def test_a_checkpoint_takes_12_bytes_per_parameter(ranks: Any, tmp_path: Path, half: str) -> None:
    """Adam's two moments and one value, the fp32 master of which a narrower weight is the rounding: none twice.

    So it is in every stage, though below stage 3 each of the two replicas holds all weights.
    """
    parameters = ranks(2, written, str(tmp_path), half, [0, 1, 2, 3], timeout=60)[0]
    for stage in range(4):
        index = read_index(tmp_path / f"{stage}")
        assert {entry.dtype for name, entry in index.tensors.items() if name.startswith(KINDS)} == {"float32"}
        loads: dict[str, int] = dict.fromkeys(index.files, 0)
        for name, entry in index.tensors.items():
            for box in entry.boxes if name.startswith(KINDS) else ():
                loads[box.file] += box.span.stop - box.span.start
        assert sum(loads.values()) == 12 * parameters
        assert len(loads) == 2 and max(loads.values()) < 1.2 * min(loads.values())  # and half each
        others = sum(entry.bytes for name, entry in index.tensors.items() if not name.startswith(KINDS))
        headers = sum(file.header.stop for file in index.files.values())
        sizes = [(tmp_path / f"{stage}" / name).stat().st_size for name in index.files]
        assert sum(sizes) == 12 * parameters + others + headers


def memory_growth_of_saves(folder: str, width: int, behind: bool) -> tuple[int, int, int]:
    with own_pages():
        small = engine(8, 1, "", **{"async": behind})  # brings in what a first save does: modules, a thread's stack
        step(small, 8)
        assert small.save_checkpoint(folder, "small")
        assert small.wait_for_checkpoint() is None
        return measured(folder, width, behind)


def measured(folder: str, width: int, behind: bool) -> tuple[int, int, int]:
    section: dict[str, Any] = {"async": behind}
    trained = engine(width, 1, **section)

    def largest(*tags: str) -> int:
        """Bytes of this process at its largest, in two steps, with a save before each."""
        Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is the present one
        for at in range(2):
            assert not tags or trained.save_checkpoint(folder, tags[at])
            step(trained, width)
        assert trained.wait_for_checkpoint() is None
        return status("VmHWM")

    for _ in range(2):
        step(trained, width)
    trained.wait_for_checkpoint()
    alone = max(largest() for _ in range(4))  # reductions overlap with the backward pass now more, now less
    # The least of three: what the reductions overlap with in a step adds to it, a copy of the weights is in all three.
    more = min(largest(f"a{i}", f"b{i}") for i in range(3)) - alone
    share = (Path(folder) / "b0" / f"rank-{trained.grid.rank:05}.safetensors").stat().st_size
    rooms = trained.checkpointer.writer.copies.values() if behind else ()
    return more, share, sum(room.numel() * room.element_size() for room in rooms)


@pytest.mark.parametrize("behind", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["behind", "before"])
def test_asynchronous_saves_need_host_memory_for_one_copy(ranks: Any, tmp_path: Path, behind: bool) -> None:
    """The copy is as large as what the rank writes, over two saves with training meanwhile. Without async: no copy."""
    results = ranks(2, memory_growth_of_saves, str(tmp_path), 1000, behind, timeout=90, new_processes=True)
    for more, share, copies in results:
        assert share > 36_000_000
        slack = 3_000_000  # what the allocator rounds up
        if behind:
            assert copies < share < copies + 20_000  # a header
            assert share / 2 < more < share + slack  # a step alone takes some of it too, and gives it back
        else:
            assert more < slack


def bytes_read_and_held(folder: str) -> tuple[int, int]:
    trained = engine(40, 3)
    seen = 0
    plain = Tensor.copy_

    def counted(self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal seen
        seen += source.numel() * source.element_size() if _mapped(source) else 0
        return plain(self, source, *args, **kwargs)

    maps: list[tuple[int, int]] = []
    map_ = MappedFiles._map

    def mapped(self: MappedFiles, file: str, span: ByteRange) -> Any:
        found = map_(self, file, span)
        maps.append((found[1].data_ptr(), found[1].data_ptr() + found[1].numel()))
        return found

    def _mapped(tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < stop for start, stop in maps)

    MappedFiles._map, Tensor.copy_ = mapped, counted  # type: ignore[method-assign, assignment]
    try:
        trained.load_checkpoint(folder)
    finally:
        MappedFiles._map, Tensor.copy_ = map_, plain  # type: ignore[method-assign]
    state = [*trained.data_axis.optimizer.state.values()]
    mine = sum(value.numel() for each in state for value in each.values() if value.dim())
    return seen, 4 * (mine + mine // 2)


def test_loading_reads_only_the_bytes_that_a_rank_holds(ranks: Any, tmp_path: Path) -> None:
    """Saved on 3 replicas, loaded on 2 in stage 3: of 12 bytes a parameter each reads its half, and no byte more."""
    ranks(3, save_on_three_ranks, str(tmp_path), timeout=60)
    for seen, mine in ranks(2, bytes_read_and_held, str(tmp_path), timeout=60):
        assert 0 <= mine - seen <= 3 * 64 * 4  # a bucket's padding is nowhere


def save_on_three_ranks(folder: str) -> None:
    trained = engine(40, 3)
    step(trained, 40)
    assert trained.save_checkpoint(folder)
