"""``monitor.profiler``: the traces of torch.profiler, read from the files of a run on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import triax
from triax import Grid, LayerSpec, PipelineModule
from triax.testing.pool import RankFailure

from support.rank_checks import triax_warnings

STEPS = 5


class Named(nn.Linear):
    """Layer with an annotation of the user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("own layer"):
            return super().forward(x)


def losses(kind: str, profiler: triax.TorchProfiler | None, json: str | None = None) -> list[float]:
    """Train a pipeline of two stages, or a plain module on two replicas, with two microbatches a step."""
    torch.manual_seed(0)
    grid = Grid(pipe=2) if kind == "pipeline" else Grid(data=2)
    model: Any = nn.Sequential(Named(4, 4), nn.Tanh(), Named(4, 4)).double()
    if kind == "pipeline":
        layers: list[Any] = [LayerSpec(Named, 4, 4), torch.tanh, LayerSpec(Named, 4, 4)]
        model = PipelineModule(layers, grid=grid, loss_fn=nn.functional.mse_loss, dtype=torch.float64)
    engine: Any = triax.Engine(
        model,
        grid=grid,
        optimizer=triax.Optimizer("SGD", lr=0.1),
        batch=triax.Batch(microbatch=2, microbatches=2),
        zero=1,
        monitor=triax.Monitoring(profiler=profiler, json=json),
    )
    x, found = torch.arange(8, dtype=torch.float64).reshape(2, 4) / 8 + grid.data.rank, []
    for _ in range(STEPS):
        if kind == "pipeline":
            found.append(engine.train_batch(iter([(x, x), (x, -x)])).item())
            continue
        for target in (x, -x):
            loss = nn.functional.mse_loss(engine(x), target)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    assert profiler is None or not (engine.spans.readers or grid.spans.readers), "spans are read after the last step"
    return found


def run(kind: str, folder: str) -> Any:
    given = str(Path(folder, "profiler")) if kind == "pipeline" else None
    with triax_warnings(logger="") as warnings:
        seen = losses(kind, triax.TorchProfiler(start=2, steps=2, folder=given), None if given else folder)
        return losses(kind, None), seen, warnings


OPS = [
    {"0F0", "0F1", "0B0", "0B1", "0SEND_F0", "0RECV_B1", "pipe send", "pipe receive"},
    {"1F0", "1F1", "1B0", "1B1", "1SEND_B0", "1RECV_F1", "pipe send", "pipe receive"},
]


@pytest.mark.parametrize("kind", ["pipeline", "module"])
def test_torch_profiler_traces_have_the_spans_of_the_steps(ranks: Any, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "made" / "profiler"
    for rank, (plain, profiled, warnings) in enumerate(ranks(2, run, kind, str(folder.parent))):
        assert plain == profiled and warnings == []
        trace = json.loads((folder / f"rank-{rank}.pt.trace.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank  # which holistic trace analysis reads
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        names = {event["name"] for event in events}
        spans = [e for e in events if e["cat"] == "user_annotation" and "gloo:" not in e["name"]]  # gloo's may overlap
        expected = OPS[rank] | {"batch", "program", "stage"} if kind == "pipeline" else {"forward", "backward"}
        assert expected | {"reduce", "optimizer", "own layer", "step 2", "step 3"} <= names
        assert kind == "pipeline" or {"data reduce_scatter", "data all_gather"} <= names
        assert {"aten::addmm", "ProfilerStep#1", "ProfilerStep#2"} <= names  # torch counts from 0
        assert not {"step 1", "step 4", "ProfilerStep#0", "ProfilerStep#3"} & names
        assert len([event for event in spans if event["name"] == "own layer"]) == 2 * 2 * (1 + (kind == "module"))
        # The spans of a thread lie within each other, as viewers need it.
        for thread in {event["tid"] for event in spans}:
            ends: list[float] = []
            for event in sorted((e for e in spans if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
                while ends and ends[-1] <= event["ts"]:
                    ends.pop()
                assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.01, event["name"]
                ends.append(event["ts"] + event["dur"])


def refused(folder: str) -> None:
    losses("module", triax.TorchProfiler(folder=folder))


def test_a_folder_that_cannot_be_made_is_refused(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailure, match=r"monitor\.profiler\.folder '.*file/in' cannot be made"):
        ranks(2, refused, str(tmp_path / "file" / "in"))


SHORT = """
import sys
import torch
import triax

model = triax.PipelineModule([triax.LayerSpec(torch.nn.Linear, 2, 2)], loss_fn=torch.nn.functional.mse_loss)
monitor = triax.Monitoring(profiler=triax.TorchProfiler(start=2, steps=5, folder=sys.argv[1]))
engine = triax.Engine(model, optimizer=triax.Optimizer("SGD", lr=0.1), batch=1, monitor=monitor)
for _ in range(3):
    engine.train_batch(iter([(torch.zeros(1, 2),) * 2]))
"""


def test_a_program_that_ends_early_writes_the_steps_it_has(tmp_path: Path) -> None:
    """Without a stop of the profiler, torch 2.13 ends such a process with a segmentation fault."""
    subprocess.run([sys.executable, "-c", SHORT, str(tmp_path)], check=True, timeout=120, cwd=tmp_path)
    trace = json.loads((tmp_path / "rank-0.pt.trace.json").read_text())
    assert {"step 2", "step 3"} <= {event.get("name") for event in trace["traceEvents"]}
