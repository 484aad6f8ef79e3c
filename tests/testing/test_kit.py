"""triax.testing as a user's project has it: the plugin, equality with one process, schedules, grids, bytes."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.pipe.program.deadlock import ScheduleError
from triax.pipe.program.verify import verify
from triax.testing import (
    Composition,
    RankFailure,
    assert_equals_one_process,
    assert_schedule,
    count_bytes,
    covering_grids,
)
from triax.testing.equality import Step, difference
from triax.testing.recording import ModuleCall, first_difference
from triax.testing.strategies import grids, microbatch_counts, schedules

from support.command_line import output_of
from support.paths import DOCS, ROOT

WIDTH = 8


def pytest_in(folder: Path, *words: str) -> str:
    """Run pytest in a folder as another project does; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *words)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_new_project_passes_its_own_tests(tmp_path: Path, ranks: int) -> None:
    """The default test runs grids of two ranks; covering_grids has tests of its own for grids of four."""
    output_of("new", tmp_path / "own")
    file = tmp_path / "own" / "test_own.py"
    assert "ranks=4)" in file.read_text()
    file.write_text(file.read_text().replace("ranks=4)", f"ranks={ranks})"))
    assert "4 passed" in pytest_in(tmp_path / "own")


def test_the_pytest_plugin_imports_nothing_heavy_by_itself(tmp_path: Path) -> None:
    """Neither torch nor hypothesis nor the core is imported, and a fixture of the project's own wins."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import sys
            import pytest

            @pytest.fixture
            def ranks():
                return "mine"

            def test_it(ranks, pytestconfig):
                assert ranks == "mine" and pytestconfig.pluginmanager.hasplugin("triax")
                heavy = ["torch", "numpy", "hypothesis", "triax.testing.pool", "triax.pipe", "triax.grid"]
                assert not [name for name in heavy if name in sys.modules]
        """)
    )
    assert "1 passed" in pytest_in(tmp_path)


class Sharded(nn.Module):
    """A residual layer in shards, with a mistake if one is named."""

    def __init__(self, mistake: str, grid: Grid) -> None:
        super().__init__()
        self.up = triax.ColumnParallelLinear(WIDTH, 2 * WIDTH, grid=grid)
        self.down = triax.RowParallelLinear(2 * WIDTH, WIDTH, grid=grid)
        self.mistake, self.grid, self.calls = mistake, grid, 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.calls += 1
        match self.mistake:
            case "mean over a shard":
                h = h - h.mean(-1, keepdim=True)
            case "state":
                h = h * self.calls
            case "shard":
                h = h * (1 + self.grid.tensor.rank)
        y: Tensor = x + self.down(h)
        return y


def build(mistake: str, grid: Grid, dtype: Any = torch.float64) -> PipelineModule:
    specs = [LayerSpec(Sharded, mistake) for _ in range(4)]
    loss = mean_of_microbatches if mistake == "loss" else F.mse_loss
    return PipelineModule(specs, grid=grid, loss_fn=loss, dtype=dtype, seed=1, partition="uniform")


def mean_of_microbatches(outputs: Tensor, labels: Tensor) -> Tensor:
    import torch.distributed as dist

    size = dist.get_world_size() if dist.is_initialized() else 1
    return F.mse_loss(outputs, labels) / size


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    draw = partial(torch.randn, 1, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [[(draw(), draw()) for _ in range(4)]]


GRIDS = [Composition((("pipe", 2),), "zb-h1", 2), Composition((("data", 2),), "1f1b", 3), Composition((("tensor", 2),))]


def test_assert_equals_one_process_passes_a_right_model() -> None:
    assert_equals_one_process(partial(build, ""), batches, GRIDS, clip=0.1)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("mean over a shard", r"Grid\(tensor=2\), schedule 1f1b, ZeRO stage 0, step 0, rank 0: the loss of an"),
        ("state", r"Grid\(data=2\), schedule 1f1b, ZeRO stage 3, step 0, rank \d: the loss"),
        ("shard", r"Grid\(tensor=2\).*: [-\d.]+, and on one process [-\d.]+; so do \d+ other numbers"),
        ("loss", r"Grid\(pipe=2\), schedule zb-h1, ZeRO stage 2, step 0"),
    ],
)
def test_assert_equals_one_process_names_the_grid_of_a_mistake(mistake: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_equals_one_process(partial(build, mistake), batches, GRIDS)


INF, NAN = torch.inf, torch.nan
NUMBERS: list[tuple[list[complex], list[complex], bool]] = [  # found, wanted, equal
    ([1.0, 2.0], [1.0, 2.0 + 1e-11], True),
    ([1.0, 2.0], [1.0, 2.0 + 1e-9], False),
    ([1 + 2j], [1 + 2j], True),
    ([1 + 2j], [1 + 5j], False),
    ([3.0], [INF], False),
    ([INF], [3.0], False),
    ([1.0, INF], [1.0, INF], True),
    ([1.0, INF], [7.0, INF], False),
    ([1.0, INF], [1.0, -INF], False),
    ([NAN], [NAN], False),
]


@pytest.mark.parametrize(("found", "wanted", "equal"), NUMBERS)
def test_difference_sees_imaginary_parts_and_infinities(
    found: list[complex], wanted: list[complex], equal: bool
) -> None:
    """The imaginary part counts, and an infinite number does not hide the others."""
    dtype = torch.complex128 if any(isinstance(value, complex) for value in found) else torch.float64
    a, b = (torch.tensor(values, dtype=dtype) for values in (found, wanted))
    here, one = (Step(0.0, 0.0, 0.0, {}, {}, {"w": tensor}, {}, {}) for tensor in (a, b))
    assert (difference(here, one, 1e-10) == "") == equal
    rank, whole = ([ModuleCall("linear", "Linear", "", [], [tensor])] for tensor in (a, b))
    assert (first_difference(whole, [rank], 1e-10).text == "") == equal


def test_the_testing_guide_shows_the_new_projects_test() -> None:
    page = (DOCS / "guides" / "testing.md").read_text()
    source = (ROOT / "examples" / "new_project" / "test_new_project.py").read_text().replace("new_project", "my_model")
    assert f"```python\n# test_my_model.py\n{source}```" in page


def test_the_guides_call_with_axes_makes_six_runs() -> None:
    page = (DOCS / "guides" / "testing.md").read_text()
    call = r"makes (\w+) runs:\n +`assert_equals_one_process\(build, batches, (.*)\)`"
    ((count, arguments),) = re.findall(call, page)
    given = eval(f"dict({arguments})")
    assert count == "six" and len(covering_grids(**given, layers=4, microbatches=4)) == 6
    assert_equals_one_process(partial(build, ""), batches, **given)


def heads(grid: Grid) -> PipelineModule:
    shape = triax.GPTConfig(
        vocab_size=16, max_position_embeddings=8, hidden_size=8, num_hidden_layers=6, num_attention_heads=2
    )
    loss = triax.NextTokenLoss(grid, vocab_size=16)
    return PipelineModule(triax.gpt_layers(shape), grid=grid, loss_fn=loss, dtype=torch.float64, partition="uniform")


def tokens() -> list[list[tuple[Tensor, Tensor]]]:
    ids = torch.randint(16, (4, 1, 9), generator=torch.Generator().manual_seed(6))
    return [[(each[:, :-1], each[:, 1:]) for each in ids]]


def test_the_guides_grids_leave_out_four_tensor_ranks() -> None:
    """The model has two heads, so of the default runs those with 1 and 2 tensor ranks remain."""
    with pytest.raises(RankFailure, match="Give tensor=2 at most") as error:
        assert_equals_one_process(heads, tokens, [Composition((("tensor", 4),))])
    assert error.value.__notes__[-1].endswith("To leave it out, give the other runs as grids=")
    (listed,) = re.findall(r"`grids=(\[each .*\])`", (DOCS / "guides" / "testing.md").read_text())
    grids = eval(listed, {"triax": triax})
    assert {dict(each.axes)["tensor"] for each in grids} == {1, 2}
    assert {each for each in covering_grids(layers=8, microbatches=4) if ("tensor", 4) not in each.axes} == {*grids}
    assert_equals_one_process(heads, tokens, [each for each in grids if ("tensor", 2) in each.axes][:3])


def test_models_and_grids_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"layers\.0\.up\.weight is torch\.float32, in which rounding hides"):
        assert_equals_one_process(partial(build, "", dtype=torch.float32), batches, GRIDS)
    with pytest.raises(RankFailure, match=r"divides batches of 4 microbatches among 3 replicas"):
        assert_equals_one_process(partial(build, ""), batches, [Composition((("data", 3),))])
    with pytest.raises(ValueError, match="there is no axis 'pipes': give some of pipe, data, context, tensor"):
        covering_grids(axes=["pipes"])
    with pytest.raises(ValueError, match="no grid of at most 4 ranks runs a model of 1 layers"):
        covering_grids(schedules=["zb-v"], layers=1)
    with pytest.raises(ValueError, match="was given no grid: give at least one"):
        assert_equals_one_process(partial(build, ""), batches, [])
    with pytest.raises(ValueError, match=r"sizes=\[\] and stages=\(0, 2\): give at least one of each"):
        assert_schedule(partial(triax.make_schedule, "1f1b"), sizes=[])


def reversed_backward(pipe: int, microbatches: int) -> triax.Schedule:
    """1F1B whose ranks run all backward passes first."""
    base = triax.make_schedule("1f1b", pipe, microbatches)
    orders = tuple(tuple(sorted(order, key=lambda op: op.kind)) for order in base.orders)
    return dataclasses.replace(base, name="reversed", orders=orders)


def test_assert_schedule_checks_schedules_of_users() -> None:
    assert_schedule(partial(triax.make_schedule, "zb-v"), sizes=[(2, 4)])
    with pytest.raises(ScheduleError, match="0B0"):
        assert_schedule(reversed_backward)
    with pytest.raises(ValueError, match=r"make\(2, 4\) returned a schedule of 4 ranks and 4 microbatches"):
        assert_schedule(lambda pipe, microbatches: triax.make_schedule("1f1b", 2 * pipe, microbatches))
    with pytest.raises(ValueError, match="give both, or neither"):
        assert_schedule(partial(triax.make_schedule, "1f1b"), build=partial(build, ""))


def test_covering_grids_has_every_pair_of_choices() -> None:
    found = covering_grids(4, layers=8, microbatches=8)
    rows = [dict(each.axes) | {"schedule": each.schedule, "stage": each.stage} for each in found]
    assert all(each.ranks <= 4 for each in found) and len(found) < 40
    sizes = (1, 2, 4)
    values = {"pipe": sizes, "data": sizes, "tensor": sizes, "stage": (0, 1, 2, 3)}
    values |= {"schedule": ("1f1b", "interleaved", "zb-h1", "zb-v")}  # type: ignore[dict-item]
    for a, b in combinations(values, 2):
        for x, y in product(values[a], values[b]):
            pair = {a: x, b: y}
            too_large = pair.get("pipe", 1) * pair.get("data", 1) * pair.get("tensor", 1) > 4
            needs_pipe = pair.get("schedule", "1f1b") != "1f1b"
            idle = needs_pipe and (pair.get("pipe", 2) == 1 or max(pair.get("data", 1), pair.get("tensor", 1)) == 4)
            meets = any(row[a] == x and row[b] == y for row in rows)
            assert meets != (too_large or idle), pair


def sent(size: int) -> list[dict[str, float]]:
    grid, found = Grid(data=2, tensor=2, timeout=60), []
    for axis in (grid.data, grid.tensor, grid.world):
        with count_bytes(grid) as around, count_bytes(grid) as counted:
            axis.all_reduce(torch.zeros(size, dtype=torch.float64))
        assert around == counted
        axis.all_reduce(torch.zeros(size))  # not within
        found.append(dict(counted))
    return found


def test_count_bytes_counts_the_bytes_of_collectives(ranks: Any) -> None:
    for found in ranks(4, sent, 16):
        assert found == [{"data": 8 * 16}, {"tensor": 8 * 16}, {"world": 2 * 3 / 4 * 8 * 16}]


@given(schedules(), st.data())
def test_strategies_draw_valid_schedules_and_grids(schedule: triax.Schedule, data: st.DataObject) -> None:
    verify(schedule)
    axes = data.draw(grids(8))
    assert list(axes) == ["pipe", "data", "tensor"] and axes["pipe"] * axes["data"] * axes["tensor"] <= 8
    count = data.draw(microbatch_counts("dualpipe-v", axes["pipe"]))
    verify(triax.make_schedule("dualpipe-v", axes["pipe"], count))
