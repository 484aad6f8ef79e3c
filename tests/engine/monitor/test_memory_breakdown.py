"""``memory_breakdown`` and ``dump_state``: the printed bytes and numbers, against formulas."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.compat.deepspeed.from_config import resolve_config

from support.training import small_config

WIDTH, LAYERS, MICRO, COUNT = 64, 2, 4, 2
WEIGHTS = LAYERS * WIDTH * WIDTH


def square(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() - y).square().mean()


def config(stage: int, **more: Any) -> dict[str, Any]:
    return small_config("AdamW", micro=MICRO, accumulation=COUNT, stage=stage, **more)


def data() -> Any:
    return iter([(torch.ones(MICRO, WIDTH), torch.zeros(MICRO, WIDTH))] * COUNT)


def listed(grid: Grid, stage: int, **more: Any) -> Any:
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = PipelineModule(layers, grid=grid, loss_fn=square)
    return triax.initialize(model=model, config=config(stage, **more))[0]


def read(text: str) -> list[tuple[int, list[dict[str, dict[str, float]]]]]:
    """Read the printed reports: for each its step, and for each rank point -> kind -> bytes."""
    found: list[tuple[int, list[dict[str, dict[str, float]]]]] = []
    kinds: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"memory at step (\d+), by kind", line):
            found.append((int(head[1]), []))
        elif line.startswith("rank "):
            found[-1][1].append({})
        elif line.startswith(" "):
            kinds = re.split(r"\s{2,}", line.strip())
        elif row := re.match(r"((?:before|after) \w+)\s+(.*)", line):
            sizes = [_bytes(cell) for cell in re.findall(r"[\d.]+ [KMG]?B", row[2])]
            found[-1][1][-1][row[1]] = dict(zip(kinds, sizes, strict=True))
    return found


def _bytes(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * 1024.0 ** ("", "K", "M", "G").index(unit.removesuffix("B"))


def broken_down(shape: tuple[int, int, int], stage: int, more: Any, steps: int = 2) -> str:
    grid = Grid(*shape, timeout=60)
    made = listed(grid, stage, memory_breakdown=True, **more)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(steps):
            made.train_batch(data())
    return printed.getvalue()


def test_memory_breakdown_lists_the_bytes_at_each_point(ranks: Any) -> None:
    """Stage 2 on 2 replicas: the papers' bytes; and a microbatch's activations, of which one is held at a time."""
    first, second = ranks(2, broken_down, (1, 2, 1), 2, {})
    assert second == ""
    reports = read(first)
    assert [step for step, _ in reports] == [1, 2]
    for number, (_, everyone) in enumerate(reports):
        assert len(everyone) == 2
        for points in everyone:
            assert list(points) == ["before forward", "after forward", "after backward", "after step"]
            for point, kinds in points.items():
                assert kinds["parameters"] == 4 * WEIGHTS and kinds["masters"] == 0
                assert kinds["process peak"] > 2**20
                late = number > 0 or point == "after step"
                assert kinds["optimizer"] == (2 * 4 * WEIGHTS / 2 if late else 0)
            # The two layers' inputs, (x - y), and the weights, which autograd saves too but were there before.
            activations = points["after forward"]["activations"]
            assert activations == pytest.approx(4 * MICRO * WIDTH * 2, rel=0.05)
            assert points["after backward"]["activations"] == 0
            assert points["before forward"]["gradients"] == points["after step"]["gradients"] == 4 * WEIGHTS / 2


def test_memory_breakdown_follows_steps_per_print() -> None:
    text = broken_down((1, 1, 1), 0, {"steps_per_print": 2}, 4)
    assert [step for step, _ in read(text)] == [2, 4] and text.count("loss ") == 2


def test_memory_breakdown_shows_the_forward_with_most_bytes(ranks: Any) -> None:
    first, _ = ranks(2, broken_down, (2, 1, 1), 0, {"pipeline": {"schedule": "gpipe"}})
    for _, (early, late) in read(first):
        # GPipe holds all microbatches before its first backward pass: of each what came in, and the difference that is
        # squared. What the first stage's layer saves is the data, which was there before.
        assert late["after forward"]["activations"] == pytest.approx(COUNT * 2 * 4 * MICRO * WIDTH, rel=0.1)
        # (A stage's input was once held in a circle, until Python's collector ran.)
        assert early["after forward"]["activations"] == late["after backward"]["activations"] == 0
        assert early["after forward"]["parameters"] == late["after forward"]["parameters"] == 4 * WEIGHTS / 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_a_plain_module_has_a_memory_breakdown(capsys: pytest.CaptureFixture[str]) -> None:
    made, *_ = triax.initialize(model=Net(), config=config(1, memory_breakdown=True))
    for _ in range(2 * COUNT):
        loss = made(torch.ones(MICRO, WIDTH))
        made.backward(loss)
        made.step()
    assert made.memory_report()["held"]["activations"] == pytest.approx(4 * MICRO * WIDTH * 2, rel=0.6)
    made.eval()(torch.ones(MICRO, WIDTH))
    reports = read(capsys.readouterr().out)
    assert [step for step, _ in reports] == [1, 2]
    for _, (points,) in reports:
        assert list(points) == ["before forward", "after forward", "after backward", "after step"]
        assert points["after forward"]["activations"] == pytest.approx(4 * MICRO * WIDTH * 2, rel=0.6)
        assert points["after backward"]["activations"] == 0 and points["after backward"]["gradients"] == 4 * WEIGHTS
        assert points["after step"]["optimizer"] == 2 * 4 * WEIGHTS


def test_spans_have_no_readers_without_a_memory_breakdown() -> None:
    made = listed(Grid(), 0)
    module, *_ = triax.initialize(model=Net(), config=config(0))
    assert not any(engine.spans.readers or engine.grid.spans.readers for engine in (made, module))


# ------------------------------------------------------------------------------------------------- dump_state


def documents(text: str) -> list[Any]:
    found, decoder = [], json.JSONDecoder()
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found


def dumped(shape: tuple[int, int, int]) -> Any:
    grid = Grid(*shape, timeout=60)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        made = listed(
            grid,
            2,
            dump_state=True,
            bf16={"enabled": True},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        )
    return printed.getvalue(), json.loads(json.dumps(resolve_config(made.config, made.batch)))


def test_the_state_of_every_rank_is_dumped(ranks: Any) -> None:
    everyone = ranks(4, dumped, (2, 2, 1))
    assert [text for text, _ in everyone[1:]] == ["", "", ""]
    text, wanted = everyone[0]
    configuration, state = documents(text)
    assert configuration == wanted
    found = state["engine"]
    assert found["class"] == "PipelineEngine" and found["grid"]["pipe"] == found["grid"]["data"] == 2
    assert found["batch"] == {"train": 16, "micro": MICRO, "accumulation": COUNT}
    assert found["optimizer"]["class"] == "AdamW" and found["optimizer"]["groups"][0]["betas"] == [0.9, 0.999]
    assert found["scheduler"]["class"] == "WarmupLR" and found["loss_scale"] is None
    half = WEIGHTS // 2
    for number, rank in enumerate(found["ranks"]):
        assert rank["rank"] == number and rank["coordinate"]["pipe"] == number // 2
        assert rank["stages"] == {f"stage {number // 2}": f"layers {number // 2} to {number // 2}"}
        assert (rank["parameters"], rank["trained"], rank["elements_owned"]) == (half, half, half // 2)
        assert rank["dtypes"] == ["bfloat16"]
        held = rank["bytes_held"]
        assert (held["parameters"], held["masters"]) == (2 * half, 4 * half // 2)


def test_the_state_of_any_module_is_dumped(capsys: pytest.CaptureFixture[str]) -> None:
    made, *_ = triax.initialize(
        model=Net(),
        training_data=torch.utils.data.TensorDataset(torch.ones(32, WIDTH)),
        config=config(0, dump_state=True, fp16={"enabled": True, "initial_scale_power": 4}),
    )
    configuration, state = documents(capsys.readouterr().out)
    assert configuration["fp16"]["initial_scale_power"] == 4
    found = state["engine"]
    assert found["class"] == "ModuleEngine" and found["module"] == "Net" and found["loss_scale"] == 16.0
    assert found["training_samples"] == 32 and found["ranks"][0]["parameters"] == WEIGHTS
    assert found["optimizer"]["class"] == "AdamW" and made.global_steps == 0
