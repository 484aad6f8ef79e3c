"""Times of collectives: the formulas of rings, trees and all-to-alls on a network of levels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from triax.plugins.plan.collectives import RankGroup, all_reduce, all_to_all, message, reduce_scatter
from triax.plugins.plan.machine import MACHINES

A100 = MACHINES["a100-80g"]
NODE, SWITCH, NETWORK = A100.links
# without latency, the times are bytes over speed
FREE = replace(A100, links=tuple(replace(link, latency=0.0) for link in A100.links))


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (4, 2)])
def test_a_ring_inside_a_node_sends_all_but_one_share_over_its_links(size: int, stride: int) -> None:
    assert math.isclose(reduce_scatter(1e9, RankGroup(size, stride), FREE), (size - 1) / size * 1e9 / NODE.speed)


@pytest.mark.parametrize(("stride", "cards"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_a_ring_over_nodes_uses_the_network_cards_of_its_members(stride: int, cards: int) -> None:
    seconds = reduce_scatter(1e9, RankGroup(16, stride), FREE)
    assert math.isclose(seconds, 15 / 16 * 1e9 / min(cards * SWITCH.speed, NODE.speed))


def test_an_all_reduce_is_two_rings_or_a_tree_if_that_is_faster() -> None:
    assert math.isclose(all_reduce(1e9, RankGroup(8), FREE), 2 * 7 / 8 * 1e9 / NODE.speed)
    many = RankGroup(1024, 8)
    assert all_reduce(8, many, A100) < 2 * reduce_scatter(8, many, A100)  # few bytes: latency counts
    assert math.isclose(all_reduce(8, many, A100), 2 * 10 * NETWORK.latency, rel_tol=1e-3)


def test_an_all_to_all_takes_as_long_as_its_slowest_level() -> None:
    inside = all_to_all(1e9, RankGroup(8), FREE)
    assert math.isclose(inside, 7 / 8 * 1e9 / NODE.speed)
    assert math.isclose(all_to_all(1e9, RankGroup(16), FREE), 8 / 16 * 1e9 / SWITCH.speed)


def test_a_message_goes_over_the_level_that_connects_its_ends() -> None:
    assert math.isclose(message(1e9, 1, A100), NODE.latency + 1e9 / NODE.speed)
    assert math.isclose(message(1e9, 8, A100), SWITCH.latency + 1e9 / SWITCH.speed)
    assert math.isclose(message(1e9, 512, A100), NETWORK.latency + 1e9 / NETWORK.speed)


def test_collectives_of_one_rank_take_no_time() -> None:
    one = RankGroup(1, 8)
    assert reduce_scatter(1e9, one, A100) == all_reduce(1e9, one, A100) == all_to_all(1e9, one, A100) == 0
