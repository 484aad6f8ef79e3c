"""Layout: each element of a parameter lies in exactly one box, and is drawn and assembled by it."""

from __future__ import annotations

import itertools
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from triax.grid import Grid
from triax.grid.assemble import assemble
from triax.grid.layout import Box, Layout, layout_of, rename, set_layout
from triax.grid.ranges import split


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    shard_dim = draw(st.none() | st.integers(0, len(shape) - 1))
    parts, unit = None, 1
    if shard_dim is not None:
        unit = draw(st.integers(1, 3))
        shape[shard_dim] *= unit
        if draw(st.booleans()):
            parts = tuple(unit * n for n in draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
            shape[shard_dim] = sum(parts)
    return Layout(tuple(shape), shard_dim=shard_dim, parts=parts, unit=unit)


@given(st.integers(0, 200), st.integers(1, 17))
def test_split_divides_a_length_evenly(length: int, parts: int) -> None:
    ranges = [split(length, parts, i) for i in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = {stop - start for start, stop in ranges}
    assert max(sizes) - min(sizes) <= 1


@given(layouts(), st.integers(1, 5))
def test_assembled_shards_are_the_whole_tensor(layout: Layout, size: int) -> None:
    whole = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    shards = [layout.shard(whole, rank, size) for rank in range(size)]
    assert [tuple(shard.shape) for shard in shards] == [layout.local_shape(rank, size) for rank in range(size)]
    assert torch.equal(layout.assemble(shards), whole)


@given(layouts(), st.integers(1, 5))
def test_the_boxes_of_all_ranks_hold_each_element_once(layout: Layout, size: int) -> None:
    seen = torch.zeros(layout.shape, dtype=torch.long)
    for rank in range(size):
        local = torch.zeros(layout.local_shape(rank, size), dtype=torch.long)
        for box in layout.boxes(rank, size):
            seen[box.whole] += 1
            local[box.local] += 1
        assert bool((local == 1).all())
    assert bool((seen == (1 if layout.sharded else size)).all())


def test_each_part_of_a_fused_weight_is_sharded_separately() -> None:
    qkv = Layout((12, 2), shard_dim=0, parts=(6, 3, 3))
    rows = torch.arange(12)[:, None].expand(12, 2)
    assert qkv.shard(rows, 0, 3)[:, 0].tolist() == [0, 1, 6, 9]
    assert qkv.shard(rows, 2, 3)[:, 0].tolist() == [4, 5, 8, 11]
    assert qkv.boxes(1, 3)[1] == Box((slice(7, 8), slice(0, 2)), (slice(2, 3), slice(0, 2)))


def test_sharding_does_not_cut_units() -> None:
    heads = Layout((18, 2), shard_dim=0, unit=3)  # 6 heads of 3 rows over 4 ranks
    rows = torch.arange(18)[:, None].expand(18, 2)
    assert [heads.shard(rows, rank, 4)[::3, 0].tolist() for rank in range(4)] == [[0], [3, 6], [9], [12, 15]]
    assert [heads.local_shape(rank, 4)[0] for rank in range(4)] == [3, 6, 3, 6]
    qkv = Layout((36,), shard_dim=0, parts=(18, 9, 9), unit=3)
    assert [qkv.lengths(rank, 2) for rank in (0, 1)] == [[9, 3, 3], [9, 6, 6]]
    assert qkv.shard(torch.arange(36), 0, 2).tolist() == [*range(9), *range(18, 21), *range(27, 30)]


@given(layouts(), st.integers(1, 5))
def test_boxes_of_a_shard_hold_whole_units(layout: Layout, size: int) -> None:
    for rank in range(size):
        for box in layout.boxes(rank, size) if layout.shard_dim is not None else []:
            assert layout.shard_dim is not None
            for span in (box.whole[layout.shard_dim], box.local[layout.shard_dim]):
                assert span.start % layout.unit == span.stop % layout.unit == 0


def test_a_shard_of_one_box_is_a_view_of_the_whole_tensor() -> None:
    whole = torch.zeros(4, 4)
    assert Layout((4, 4), shard_dim=1).shard(whole, 1, 2)._base is whole
    assert Layout((4, 4)).shard(whole, 1, 2) is whole


def test_a_parameter_carries_its_layout() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    assert layout_of(parameter) == Layout((2, 3))  # nobody marked it: whole on every rank
    set_layout(parameter, Layout((4, 3), shard_dim=0))
    rename(parameter, "layers.0.weight", tie="embed")
    assert layout_of(parameter) == Layout((4, 3), name="layers.0.weight", shard_dim=0, tie="embed")
    assert parameter.layout == torch.strided  # torch's own attribute of that name is not touched


def test_a_layout_survives_casts_and_pickling() -> None:
    layer: nn.Linear = nn.Linear(3, 2)
    layout = Layout((4, 3), shard_dim=0)
    set_layout(layer.get_parameter("weight"), layout)
    layer.double().to("cpu").requires_grad_(False)
    assert layout_of(layer.weight) == layout_of(pickle.loads(pickle.dumps(layer)).weight) == layout


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Layout((4,), parts=(2, 2)), r"parts=\(2, 2\) and unit=1 describe .* shard_dim is None"),
        (lambda: Layout((4,), shard_dim=1), r"shard_dim=1 is no dim of the shape \(4,\): give 0 to 0"),
        (lambda: Layout((4,), shard_dim=-1), "shard_dim=-1"),
        (lambda: Layout((4,), shard_dim=0, parts=(2, 1)), r"add up to 3, but dim 0 of the shape \(4,\) is 4"),
        (lambda: Layout((4,), shard_dim=0, partial=True), "partial=True is for replicated"),
        (lambda: Layout((4,), unit=2), "parts=None and unit=2 describe"),
        (lambda: Layout((9,), shard_dim=0, unit=2), r"unit=2 does not divide 9, .* dim 0 of the shape \(9,\)"),
        (lambda: Layout((6,), shard_dim=0, parts=(4, 2), unit=4), "unit=4 does not divide 4 and 2"),
        (
            lambda: Layout((4,), name="w", shard_dim=0).shard(torch.zeros(3), 0, 2),
            r"the shape \(3,\), but w has the shape \(4,\)",
        ),
    ],
)
def test_invalid_layouts_of_a_parameter_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(("tensors", "experts"), [(1, 2), (2, 1), (2, 2), (3, 4)])
def test_shards_over_two_axes_assemble_to_the_whole_tensor(tensors: int, experts: int) -> None:
    """Of 4 experts with matrices (6, 5): whole matrices, columns, and rows in two parts of 2 and 4."""
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)

    def share(start: int, length: int, rank: int, size: int) -> list[int]:
        return [*range(start + length * rank // size, start + length * (rank + 1) // size)]

    for shard_dim, parts in ((None, None), (2, None), (1, (2, 4))):
        layout = Layout((4, 6, 5), expert_dim=0, shard_dim=shard_dim, parts=parts)
        shards: list[list[Tensor]] = [[] for _ in range(experts)]
        for expert, tensor in itertools.product(range(experts), range(tensors)):
            shard = layout.shard(whole, tensor, tensors, (expert, experts))
            wanted = whole[share(0, 4, expert, experts)]
            if shard_dim == 2:
                wanted = wanted[:, :, share(0, 5, tensor, tensors)]
            elif shard_dim == 1:
                wanted = wanted[:, share(0, 2, tensor, tensors) + share(2, 4, tensor, tensors)]
            assert torch.equal(shard, wanted)
            assert layout.local_shape(tensor, tensors, (expert, experts)) == wanted.shape
            shards[expert].append(shard)
        assert torch.equal(layout.assemble_experts(shards), whole)


def test_replicas_of_experts_lie_on_an_axis_of_their_own() -> None:
    assert Layout((4, 6, 5), expert_dim=0).replicas == "expert_data" and Layout((4,)).replicas == "data_context"


def test_an_expert_dim_that_is_no_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="expert_dim=2 must be a dim of the shape"):
        Layout((4, 5), expert_dim=2)
    with pytest.raises(ValueError, match="other than shard_dim=0"):
        Layout((4, 5), shard_dim=0, expert_dim=0)


WHOLE = {  # lengths that no dtype's size divides, one of no elements, one number
    "a": torch.arange(21, dtype=torch.int8).view(7, 3),
    "b": torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    "c": torch.tensor(True),
    "d": torch.zeros(0, 4, dtype=torch.bfloat16),
    "e": torch.arange(9.0, dtype=torch.float32).to(torch.float8_e5m2),
}


def gathered(limit: int) -> dict[str, torch.Tensor]:
    """Assemble tensors of which both tensor ranks hold a part, or the whole if it is a number."""
    grid = Grid(tensor=2)
    layouts = {name: Layout(tuple(whole.shape), shard_dim=0 if whole.dim() else None) for name, whole in WHOLE.items()}
    shards = {name: (layout, layout.shard(WHOLE[name], grid.rank, 2)) for name, layout in layouts.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triax.grid.assemble.MESSAGE", limit)
        return assemble(grid, shards)


@pytest.mark.parametrize("limit", [1, 30, 2**26])
def test_shards_are_gathered_in_one_message_or_several(ranks: Any, limit: int) -> None:
    for found in ranks(2, gathered, limit):
        assert found.keys() == WHOLE.keys()
        for name, whole in WHOLE.items():
            assert found[name].dtype == whole.dtype and found[name].shape == whole.shape
            assert found[name].untyped_storage().nbytes() == whole.nbytes  # not a view of a message
            assert torch.equal(found[name].view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8))
