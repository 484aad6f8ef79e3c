"""A teacher on a grid of its own in other processes, beside the teacher on the student's grid and plain PyTorch."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import triax
from triax import Grid
from triax.context.order import shard
from triax.grid.ranges import split
from triax.train.methods import RemoteTeacher, distill_loss, serve_teacher, with_teacher

from support.paths import DOCS
from support.processes import TRIAX, free_port, program, started
from support.readme_blocks import programs
from support.trl_in_float64 import exact

WORDS, K, TEMPERATURE, ROWS, LENGTH = 29, 5, 1.5, 4, 12
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.2}
TEACHER = f"""
import os, sys, torch, triax
from triax.train.methods import distill_loss, serve_teacher

folder, axis, one, two, three, four, five = sys.argv[1:]
grid = triax.Grid(**{{axis: 2}}, timeout=60)
attention = {{"attention": "ring"}} if axis == "context" else {{}}
layers = triax.llama_layers(triax.config_from_hf(f"{{folder}}/teacher"), **attention)
layers = triax.load_hf(f"{{folder}}/teacher", layers)
model = triax.PipelineModule(layers, grid=grid, loss_fn=distill_loss(grid, {WORDS}), dtype=torch.float64)
engine = triax.Engine(model, batch=triax.Batch(size=4, microbatch=2))
assert serve_teacher(engine, one) == serve_teacher(engine, two, replicas=2) == 8  # microbatches
serve_teacher(engine, three)
try:
    serve_teacher(engine, four)
except ValueError as error:
    assert "a vocabulary of 30, the teacher of 29" in str(error)
if grid.rank == 0:
    open(f"{{folder}}/pid", "w").write(str(os.getpid()))
serve_teacher(engine, five)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--nproc-per-node", "2"]


def tokens() -> Any:
    return torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def engine_of(grid: Grid, folder: str, temperature: float = TEMPERATURE, words: int = WORDS) -> Any:
    options: dict[str, Any] = {"attention": "ring"} if grid.context.size > 1 else {}
    layers: Any = triax.llama_layers(triax.config_from_hf(folder), **options)  # type: ignore[arg-type]
    layers = triax.load_hf(folder, layers)
    loss_fn = distill_loss(grid, words, "forward", temperature=temperature)
    model = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, dtype=torch.float64, partition="uniform")
    batch = triax.Batch(size=ROWS, microbatch=2 // grid.data.size)
    return triax.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), batch=batch)


def data_of(grid: Grid) -> list[Any]:
    """The two microbatches of this replica."""
    parts = tokens().chunk(2 * grid.data.size)[2 * grid.data.rank :][:2]
    return [(each[:, :-1], {"labels": each[:, 1:]}) for each in parts]


def distilled(folder: str, address: str, axes: dict[str, Any]) -> list[tuple[float, int, int, list[Any]]]:
    """Return for top_k and all words the loss, the bytes to and from the teacher, and the entries on this rank."""
    grid = Grid(**axes, timeout=60)
    engine, near = engine_of(grid, f"{folder}/student"), engine_of(grid, f"{folder}/teacher")
    found = []
    with RemoteTeacher(engine, address) as teacher:
        for top_k in (K, None) * (2 // grid.data.size):
            before = teacher.sent, teacher.received
            data = with_teacher(engine, teacher, data_of(grid), top_k)
            assert len(data) == 2
            for (_, mine), (_, theirs) in zip(data, with_teacher(engine, near, data_of(grid), top_k), strict=True):
                assert mine.keys() == theirs.keys()
                for name, each in mine.items():
                    assert each.dtype == theirs[name].dtype
                    if grid.context.size > 1 and name != "labels":  # the teacher nearby has this rank's tokens
                        each = shard(each, grid.context)
                    torch.testing.assert_close(each, theirs[name], atol=1e-10, rtol=0)
            bytes_ = teacher.sent - before[0], teacher.received - before[1]
            found.append((engine.eval_batch(iter(data)).item(), *bytes_, [labels for _, labels in data]))
    with pytest.raises(RuntimeError, match="is closed: make another RemoteTeacher"):
        with_teacher(engine, teacher, data_of(grid), K)
    return found


def refused_and_lost(folder: str, wrong: str, address: str) -> list[str]:
    """Return the errors of a student with other words, and of one whose teacher is killed."""
    grid = Grid(tensor=2, timeout=20)
    errors = []
    stranger = engine_of(grid, f"{folder}/student", words=30)
    other = RemoteTeacher(stranger, wrong)
    engine = engine_of(grid, f"{folder}/student")
    with pytest.raises(RuntimeError, match="a vocabulary of 30") as error:
        with_teacher(stranger, other, data_of(grid), K)
    errors.append(str(error.value))
    teacher = RemoteTeacher(engine, address)
    with_teacher(engine, teacher, data_of(grid), K)
    if grid.rank == 0:
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        with_teacher(engine, teacher, data_of(grid), K)
    return [*errors, str(error.value)]


@pytest.mark.parametrize(
    "axis", ["tensor", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("data", "pipe", "context"))]
)
def test_a_remote_teacher_gives_the_loss_of_the_equations(ranks: Any, tmp_path: Path, axis: str) -> None:
    """Students on pipe 2 x tensor 2, data 2 and context 2; one with other words; and a teacher that is killed."""
    import transformers

    folder = str(tmp_path)
    wanted: dict[int | None, float] = {}
    with exact(), torch.no_grad():
        models = {}
        for seed, (name, more) in enumerate({"student": {}, "teacher": {"num_hidden_layers": 3}}.items()):
            torch.manual_seed(seed)
            models[name] = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | more)).double()
            models[name].save_pretrained(f"{folder}/{name}")
        s, logits = (models[name](input_ids=tokens()[:, :-1]).logits for name in ("student", "teacher"))
    s, t = ((each / TEMPERATURE).softmax(-1) for each in (s, logits))
    best = t.topk(K)
    wanted[None] = (t * (t / s).log()).sum(-1).mean().item()
    s, t = (torch.cat([(p := each.gather(-1, best.indices)), 1 - p.sum(-1, True)], -1) for each in (s, t))
    wanted[K] = (t * (t / s).log()).sum(-1).mean().item()
    (tmp_path / "teacher.py").write_text(TEACHER)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(5)]
    command = [*TRIAX, "run", "--nproc", 2, tmp_path / "teacher.py", folder, axis, *addresses]
    with started(*command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}) as teacher:
        try:
            for address, axes in zip(addresses, ({"pipe": 2, "tensor": 2}, {"data": 2}, {"context": 2}), strict=False):
                everyone = ranks(math.prod(axes.values()), distilled, folder, address, axes)
                for rank, found in enumerate(everyone):
                    assert len(found) == 4 // axes.get("data", 1)
                    for call, (loss, sent, received, data) in enumerate(found):
                        top_k = None if call % 2 else K
                        assert loss == pytest.approx(wanted[top_k], abs=1e-10, rel=0)
                        if "pipe" in axes and rank < 2:  # the first stage
                            assert sent == received == 0 and "teacher" not in data[0]
                            continue
                        rows = slice(2 * rank, 2 * rank + 2) if "data" in axes else slice(None)
                        start, stop = split(WORDS, 2, rank - 2) if "pipe" in axes else (0, WORDS)
                        value = torch.cat([labels["teacher"] for labels in data])
                        value = value if top_k else value[..., : stop - start]
                        whole = best.values.log() if top_k else logits[..., start:stop]
                        torch.testing.assert_close(value, whole[rows], atol=1e-10, rtol=0)
                        if rank == 3 or ("context" in axes and rank == 1):  # gets its part over the grid
                            assert sent == received == 0
                            continue
                        n = LENGTH * len(value)
                        answer = n * K * (8 + 4) if top_k else n * WORDS * 8
                        assert 0 < sent - 8 - 8 * n < 150 + 2 * 20 and 0 < received - 8 - answer < 150
            for refused, lost in ranks(2, refused_and_lost, folder, *addresses[3:]):
                assert "failed: ValueError: the student has a vocabulary of 30, the teacher of 29" in refused
                assert f"the teacher at {addresses[4]} is gone or did not answer within 20" in lost
        except BaseException:
            os.killpg(teacher.pid, signal.SIGTERM)
            print(teacher.communicate(timeout=30)[1])
            raise


def left_alone(address: str) -> str:
    """Return the error of a teacher on two ranks whose student leaves, after errors of its engine and address."""
    grid = Grid(tensor=2, timeout=20)
    config = triax.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = triax.PipelineModule(triax.llama_layers(config), grid=grid, loss_fn=distill_loss(grid, 8))
    teacher: Any = triax.Engine(model, batch=triax.Batch(size=1, microbatch=1))
    with pytest.raises((ValueError, RuntimeError), match="give host:port"):
        RemoteTeacher(teacher, "localhost")
    model.loss_fn = triax.NextTokenLoss(grid, 8)
    with pytest.raises(TypeError, match="an engine of the teacher whose loss_fn is a NextTokenLoss"):
        serve_teacher(teacher, address)
    model.loss_fn = distill_loss(grid, 8)
    student = threading.Thread(target=lambda: triax.transfer_group(address, 1, 2, timeout=20))
    if grid.rank == 0:
        student.start()
    with pytest.raises(RuntimeError) as error:
        serve_teacher(teacher, address)
    return str(error.value)


def test_a_student_that_leaves_is_named_on_every_rank(ranks: Any) -> None:
    first, second = ranks(2, left_alone, f"127.0.0.1:{free_port()}")
    assert first == second
    assert first.startswith("replica 0 of the student is gone or asked for nothing within 20 s")


@pytest.mark.exhaustive
def test_commands_of_the_remote_teacher_guide_print_its_output(ranks: Any, tmp_path: Path) -> None:
    page = (DOCS / "guides" / "distillation.md").read_text()
    section = page.partition("## A teacher on other processes")[2].partition("\n## ")[0]
    first, second = (shlex.split(each) for each in re.findall(r"^torchrun .*", section, re.MULTILINE))
    at = str(free_port())
    for name, source in programs(section).items():
        (tmp_path / name).write_text(source.replace("29612", at))
    launched = [*TORCHRUN, "--master-port", free_port(), *first[-1:]]
    with started(*launched, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}) as teacher:
        printed, *_ = ranks(int(second[2]), program, second[3:], str(tmp_path))
        out, error = teacher.communicate(timeout=60)
    assert teacher.returncode == 0, error
    shown = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    assert shown == [printed] and out == ""
