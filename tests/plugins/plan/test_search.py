"""Search against brute force, its count of layouts, its speed, and its answer when nothing fits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from triax.models.config import GPTConfig, LlamaConfig, MixtralConfig, TransformerConfig
from triax.plugins.plan.machine import MACHINES
from triax.plugins.plan.search import Planned, Search, Searcher, Space, preference
from triax.plugins.plan.work import Work

H100 = MACHINES["h100-80g"]


def brute_force(searcher: Searcher, top: int) -> tuple[list[Planned], int]:
    """Evaluate every layout of the space, without a bound; return the best ones, and the number of all."""
    found, needless, considered = list[Planned](), list[Planned](), 0
    for layout in (layout for node in searcher.nodes() for layout in searcher.layouts(node)):
        considered += 1
        each = searcher.evaluate(layout)
        if each.memory.total <= searcher.limit:
            (needless if searcher.needless(layout) else found).append(each)
    order = lambda each: preference(each.layout, each.time.seconds)  # noqa: E731
    found.sort(key=order)
    assert not needless or order(min(needless, key=order)) >= order(found[0])  # what the search leaves out is no better
    return found[:top], considered


def small_space(draw: random.Random) -> tuple[Work, Space]:
    """Draw a small model, a machine with little memory, and a few given keys."""
    width, blocks = draw.choice((512, 1024, 2048)), draw.choice((4, 6, 8))
    vocabulary, heads, drawn = (draw.choice(each) for each in ((1000, 32000), (4, 8), ("gpt", "llama", "mixtral")))
    dropout = draw.choice((0.0, 0.1))
    config: TransformerConfig = GPTConfig(int(vocabulary), 1024, width, blocks, int(heads), dropout=dropout)
    if drawn == "llama":
        config = LlamaConfig(int(vocabulary), 1024, width, blocks, int(heads), 4, 2 * width)
    elif drawn == "mixtral":
        config = MixtralConfig(int(vocabulary), 1024, width, blocks, int(heads), 4, 2 * width, num_experts=4)
    machine = draw.choice((H100, MACHINES["a100-80g"]))
    memory = draw.choice((2.5e9, 4e9, 8e9, 80e9))
    given: dict[str, list[Any]] = {}
    if draw.random() < 0.5:
        given["recompute"] = [draw.choice(("none", "selective", "full"))]
    if draw.random() < 0.3:
        given["zero"] = [draw.choice((0, 1, 3))]
    if draw.random() < 0.3:
        given["microbatch"] = [1]
    given["offload"] = [False] if draw.random() < 0.7 else [False, True]
    given["context"] = [1] if draw.random() < 0.7 else [1, 2]
    work = Work(config, machine, draw.choice((4, 8, 12)), draw.choice((256, 1024)))
    return work, Space(draw.choice((1, 2, 4, 6, 8)), given, memory)


def assert_search_is_brute_force(numbers: range) -> None:
    some = 0
    for number in numbers:
        work, space = small_space(random.Random(number))
        top = 1 + number % 5
        pruned = Searcher(work, space).run(top)
        best, considered = brute_force(Searcher(work, space), top)
        assert [each.layout for each in pruned.layouts] == [each.layout for each in best], number
        assert [each.time.seconds for each in pruned.layouts] == [each.time.seconds for each in best], number
        assert pruned.considered == considered == len(pruned.layouts) + sum(pruned.excluded.values()), number
        some += bool(best)
    assert some > len(numbers) / 2


def test_the_search_agrees_with_brute_force() -> None:
    assert_search_is_brute_force(range(12))


def test_unequal_ranks_keep_their_own_memory_limits() -> None:
    """The second rank is half as fast and has a third of the memory: against all layouts, one by one."""
    work = Work(LlamaConfig.preset("llama3-8b"), H100, 16, 2048, speeds=(1.0, 0.5))
    given: dict[str, list[Any]] = {"pipe": [2], "context": [1], "offload": [False]}
    limits = [80e9, 28e9]
    searcher = Searcher(work, Space(8, given, limits))
    pruned, (best, considered) = searcher.run(5), brute_force(Searcher(work, Space(8, given, limits)), 100)
    fitting = [each for each in best if _fits_all(searcher, each.layout, limits)]
    assert [each.layout for each in pruned.layouts] == [each.layout for each in fitting[:5]]
    assert pruned.considered == considered and {each.layout.chunks for each in pruned.layouts} == {1}
    first = [len(stages[0]) for stages in searcher.memory.stages(pruned.layouts[0].layout)]
    assert first[1] < 0.6 * first[0]
    with pytest.raises(ValueError, match="Give --layout pipe=2 too"):
        Searcher(work, Space(8, {}, limits))


def _fits_all(searcher: Searcher, layout: Any, limits: list[float]) -> bool:
    ranks = searcher.memory.ranks(layout, searcher.work.batch, searcher.work.sequence)
    return all(each.total <= limit for each, limit in zip(ranks, limits, strict=True))


@pytest.mark.exhaustive
def test_the_search_agrees_with_brute_force_on_200_spaces() -> None:
    assert_search_is_brute_force(range(200))


def timed(found: Search) -> int:
    """Count the layouts whose time was computed; the others were excluded by their memory or a lower bound."""
    return len(found.layouts) + found.excluded["slower than the layouts kept"]


def test_searching_405b_on_16384_gpus_times_few_layouts() -> None:
    config = LlamaConfig.preset("llama3.1-405b")
    found = Searcher(Work(config, H100, 2048, 8192), Space(16384)).run()
    assert found.considered > 400_000 and timed(found) < 0.01 * found.considered  # seconds, not minutes
    given = {"schedule": ["1f1b", "interleaved"]}
    [best] = Searcher(Work(config, H100, 2048, 8192), Space(16384, given)).run(1).layouts
    assert best.layout.tensor == 8 and best.layout.pipe > 4 and best.memory.total < H100.memory
    assert found.layouts[0].time.seconds <= best.time.seconds
    # Grattafiori et al. 2024, table 4: 41 % with tensor 8, pipe 16, data 128, on 16,384 GPUs
    mfu = Work(config, H100, 2048, 8192).model_flops / best.time.seconds / 16384 / H100.peak["bf16"]
    assert 0.38 < mfu < 0.47


@pytest.mark.parametrize(("model", "gpus", "batch"), [("llama3-8b", 8, 64), ("llama3-70b", 64, 512)])
def test_a_search_times_few_layouts_if_few_fit(model: str, gpus: int, batch: int) -> None:
    found = Searcher(Work(LlamaConfig.preset(model), H100, batch, 4096), Space(gpus)).run()
    assert found.considered > 10_000 and timed(found) < 0.03 * found.considered


def test_a_search_keeps_the_given_keys_and_varies_the_rest() -> None:
    work = Work(LlamaConfig.preset("llama3-8b"), H100, 64, 4096)
    given: dict[str, list[Any]] = {"pipe": [2], "tensor": [2], "recompute": ["full"], "zero": [1]}
    found = Searcher(work, Space(16, given)).run(5)
    for each in found.layouts:
        layout = each.layout
        assert (layout.pipe, layout.tensor, layout.data * layout.context, layout.zero) == (2, 2, 4, 1)
        assert layout.recompute == "full"
    assert len({each.layout for each in found.layouts}) == 5


def test_a_search_without_a_fitting_layout_returns_the_smallest() -> None:
    work = Work(LlamaConfig.preset("llama3-70b"), H100, 64, 8192)
    space = Space(8, {"offload": [False], "context": [1]})
    found = Searcher(work, space).run()
    assert not found.layouts and found.nearest is not None
    assert found.nearest.memory.total > H100.memory
    assert found.excluded == {Searcher.MEMORY: found.considered}
    larger = replace(H100, memory=found.nearest.memory.total + 1)
    assert Searcher(replace(work, machine=larger), space).run(1).layouts


def test_an_empty_search_space_says_why() -> None:
    work = Work(LlamaConfig.preset("llama3-8b"), H100, 30, 4096)
    searcher = Searcher(work, Space(8, {"data": [8], "microbatch": [4]}))
    assert not searcher.run().layouts and "data x microbatch = 32" in searcher.impossible()
    assert "tensor=3, which does not divide 8 GPUs" in Searcher(work, Space(8, {"tensor": [3]})).impossible()
