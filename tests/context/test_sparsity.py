"""Block masks of DeepSpeed's sparse_attention section: layouts, defaults and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triax.context import (
    BigBirdSparsity,
    BSLongformerSparsity,
    DenseSparsity,
    FixedSparsity,
    Sparsity,
    VariableSparsity,
    make_sparsity,
)


def drawn(sparsity: Sparsity, blocks: int, head: int = 0) -> list[str]:
    (layout,) = sparsity.layout(blocks * sparsity.block, range(head, head + 1))
    return ["".join("X" if kept else "." for kept in row) for row in layout.tolist()]


def test_fixed_sparsity_draws_deepspeeds_pattern() -> None:
    local = FixedSparsity(num_local_blocks=3, attention="unidirectional")
    assert drawn(local, 7) == ["X......", "XX.....", "XXX....", "..XX...", "..XXX..", "..XXXX.", "..X..XX"]
    both = FixedSparsity(num_local_blocks=2, horizontal_global_attention=True)
    assert drawn(both, 4) == ["XX.X", "XXXX", ".XXX", "XXXX"]


def test_fixed_sparsity_draws_different_patterns_for_heads() -> None:
    sparsity = FixedSparsity(num_local_blocks=2, num_different_global_patterns=2, different_layout_per_head=True)
    assert drawn(sparsity, 4, head=0) == drawn(sparsity, 4, head=2) == ["XX.X", "XX.X", ".XXX", ".XXX"]
    assert drawn(sparsity, 4, head=1) == ["XXX.", "XXX.", "X.XX", "X.XX"]
    assert sparsity.layout(64, range(1, 3)).shape == (2, 4, 4)


def test_variable_sparsity_draws_deepspeeds_pattern() -> None:
    sparsity = VariableSparsity(local_window_blocks=[1, 2], global_block_indices=[0, 9])
    assert drawn(sparsity, 5) == ["X....", "XXX..", "XXX..", "X..XX", "X..XX"]
    ranges = VariableSparsity(
        local_window_blocks=[1],
        global_block_indices=[1],
        global_block_end_indices=[3],
        horizontal_global_attention=True,
    )
    assert drawn(ranges, 4) == ["XXX.", "XXXX", "XXXX", ".XXX"]


def test_bslongformer_sparsity_draws_deepspeeds_pattern() -> None:
    assert drawn(BSLongformerSparsity(), 5) == ["XXXXX", "XXX..", "XXXX.", "X.XXX", "X..XX"]
    one_way = BSLongformerSparsity(attention="unidirectional", global_block_indices=[1])
    assert drawn(one_way, 5) == ["X....", "XX...", ".XX..", ".XXX.", ".X.XX"]


def test_bigbird_draws_its_random_blocks_from_the_seed_alone() -> None:
    def four_heads(**options: Any) -> Tensor:
        return BigBirdSparsity(num_random_blocks=3, different_layout_per_head=True, **options).layout(1024, range(4))

    assert torch.equal(four_heads(), four_heads()) and not torch.equal(four_heads(), four_heads(seed=1))
    first, second, *_ = four_heads()
    assert not torch.equal(first, second)
    last_heads = BigBirdSparsity(num_random_blocks=3, different_layout_per_head=True).layout(1024, range(2, 4))
    assert torch.equal(four_heads()[2:], last_heads), "a head's blocks depend on the heads that are asked for"


def test_bigbird_adds_its_random_blocks_to_its_window() -> None:
    window, layout = (BigBirdSparsity(num_random_blocks=count).layout(64 * 16)[0] for count in (0, 3))
    added = (layout & ~window).sum(1)  # in each of 64 rows of blocks; a drawn block may lie in the window already
    assert bool((layout | window == layout).all()) and int(added.max()) == 3
    assert added[1:].float().mean() > 2  # of 64 blocks 3 to 5 are in the window
    assert not BigBirdSparsity(attention="unidirectional").layout(64 * 16).triu(1).any()


def test_sparsity_has_one_layout_for_all_heads_by_default() -> None:
    assert BigBirdSparsity().layout(256, range(8)).shape == (1, 16, 16)
    assert bool(DenseSparsity(block=3).layout(8).all()) and DenseSparsity(block=3).layout(8).shape == (1, 3, 3)


def test_make_sparsity_reads_a_configuration_section() -> None:
    assert make_sparsity({}) == FixedSparsity(block=16, num_local_blocks=4, num_global_blocks=1)
    section = {"mode": "variable", "block": 32, "local_window_blocks": [4, 2], "global_block_indices": [0, 3]}
    found = make_sparsity(section)
    assert isinstance(found, VariableSparsity) and found.block == 32 and found.local_window_blocks == (4, 2)
    assert hash(found) == hash(make_sparsity(section))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mode": "random"}, "Give one of dense, fixed, variable, bigbird, bslongformer"),
        ({"mode": "dense", "num_local_blocks": 2}, "which the mode dense does not have"),
        ({"block": 0}, "block=0"),
        ({"attention": "causal"}, "Give bidirectional or unidirectional"),
        ({"num_local_blocks": 4, "num_global_blocks": 3}, "Give a divisor of 4"),
        ({"num_different_global_patterns": 2}, "Set different_layout_per_head to true"),
        ({"num_different_global_patterns": 9, "different_layout_per_head": True}, "Give 1 to 4"),
        ({"attention": "unidirectional", "horizontal_global_attention": True}, "Set it to false"),
        ({"mode": "variable", "local_window_blocks": []}, "at least one number"),
        (
            {"mode": "bslongformer", "global_block_indices": [2], "global_block_end_indices": [2]},
            "Give for each start of a range an end after it",
        ),
    ],
)
def test_sparsity_errors_say_what_to_change(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_sparsity(section)
