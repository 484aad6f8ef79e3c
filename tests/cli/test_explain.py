"""``triax train --explain``: bytes against the memory report, stages against modules, recipes of 8 and 64 GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import triax
from triax import Grid, PipelineModule
from triax.cli.explain import explain, memory_of_job, text
from triax.grid import Axis, layout_of
from triax.options.checkpoints import Checkpoints
from triax.options.monitoring import Monitoring
from triax.plugins.plan.memory import ModelMemory
from triax.train.file import read_training_file
from triax.train.job import Job, resolve
from triax.train.sections import TrainingFile

from support.command_line import run_triax
from support.paths import ROOT

RECIPES = ROOT / "examples" / "recipes"
LARGE = RECIPES / "llama3-70b-64gpus.yaml"
# The recipe's options on a model and a grid that fit here. The vocabulary and the length are even, as there.
_SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 88,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
SMALL = [f"model.overrides={json.dumps(_SIZES)}", "training.sequence=16", "batch.tokens=128"]
SMALL += ["checkpoint=false", "monitor.trace=false"]
STATES = ("parameters", "gradients", "masters", "optimizer", "buffers")


def small(*changes: str) -> Job:
    return resolve(read_training_file(LARGE, [*SMALL, *changes])[0])


def counted(changes: list[str]) -> Any:
    """The memory report of a rank of the small run, after a step."""
    from triax.train.model import build_module, parameter_groups

    job = small(*changes)
    sizes = job.topology.sizes
    grid = Grid(sizes["pipe"], sizes["data"], sizes["tensor"], timeout=60)
    module = build_module(job, grid)
    options = job.options.changed(monitor=Monitoring(), checkpoint=Checkpoints())
    engine: Any = triax.Engine(module, options, parameters=parameter_groups(job, module))
    engine.record_memory = True
    rows = torch.randint(96, (job.batch.micro, 17), generator=torch.Generator().manual_seed(0))
    batch = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    engine.train_batch(iter([batch] * job.batch.accumulation))
    return grid.pipe.rank, engine.memory_report()["held"]


@pytest.mark.parametrize(
    "changes",
    [
        ["grid.pipe=2", "grid.data=1", "grid.tensor=2"],
        pytest.param(["grid.pipe=2", "grid.data=2", "grid.tensor=2"], marks=pytest.mark.exhaustive),
        pytest.param(["grid.pipe=4", "grid.data=2", "grid.tensor=1", "zero=3"], marks=pytest.mark.exhaustive),
        pytest.param(
            ["grid.pipe=2", "grid.data=2", "grid.tensor=1", "schedule=auto", "schedule.costs=[1,1,1]"]
            + ["optimizer={type: SGD, momentum: 0.9, decays: all}", "recompute=full"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_explained_bytes_equal_the_memory_report(ranks: Any, changes: list[str]) -> None:
    job = small(*changes)
    found = explain(job)["memory"]
    on_cpu = ModelMemory(job.model, options=memory_of_job(job).options, device="cpu")
    for pipe, held in ranks(job.topology.world_size, counted, changes):
        assert {kind: held[kind] for kind in STATES} == {kind: found[pipe][kind] for kind in STATES}
        assert held["activations"] == activations(job, on_cpu)[pipe]


def activations(job: Job, memory: ModelMemory) -> list[float]:
    from triax.cli.explain import layout_of_job

    layout = layout_of_job(job)
    return [each.activations for each in memory.ranks(layout, job.batch.train, job.sequence, job.schedule)]


@pytest.mark.parametrize("name", ["llama3-8b-8gpus", "llama3-70b-64gpus"])
def test_recipes_are_built_on_the_meta_device(name: str) -> None:
    """Stages, layers and parameters of each pipe rank, and what a tensor shard of them holds."""
    job = resolve(read_training_file(RECIPES / f"{name}.yaml")[0])
    found, sizes = explain(job), job.topology.sizes
    assert sum(stage["parameters"] for stage in found["stages"]) == job.model.parameter_count
    for pipe in range(sizes["pipe"]):
        places = dict.fromkeys(("data", "context", "expert", "world"), (0, 1))
        places |= {"pipe": (pipe, sizes["pipe"]), "tensor": (0, sizes["tensor"])}
        axes = {axis: Axis(axis, range(size), rank, None) for axis, (rank, size) in places.items()}
        grid = Grid.__new__(Grid)  # the axes of a rank, without processes
        vars(grid).update(axes, size=1, rank=0, device=torch.device("meta"), data_context=axes["data"])
        layers = job.model.layers(sequence_parallel=job.file.grid.sequence_parallel)
        module = PipelineModule(layers, grid=grid, placement=list(job.schedule.placement), device="meta")
        (stage,) = (stage for stage in found["stages"] if stage["pipe"] == pipe)
        assert [*map(int, module.layers)] == [*range(stage["layers"][0], stage["layers"][1] + 1)]
        assert sum(torch.Size(layout_of(p).shape).numel() for p in module.parameters()) == stage["parameters"]
        held = sum(p.numel() for p in module.parameters())
        assert found["memory"][pipe]["parameters"] == pytest.approx(2 * held, rel=1e-4)  # bf16, and padding
    assert max(row["total"] for row in found["memory"]) < 80e9
    script = (RECIPES / f"{name}.sbatch").read_text()
    assert f"triax train examples/recipes/{name}.yaml" in script
    nodes, tasks = (int(script.partition(f"#SBATCH --{key}=")[2].split()[0]) for key in ("nodes", "ntasks-per-node"))
    assert nodes * tasks == found["processes"]


_MEASURED = """
import sys
sys.argv = ["triax", "train", "--explain", "--json", sys.argv[1]]
from triax.cli.main import main
try:
    main()
finally:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = 1024 * int(status["VmHWM"].split()[0])
    print(peak, file=sys.stderr)
"""


def test_the_large_recipe_is_explained_without_its_weights() -> None:
    words = [sys.executable, "-c", _MEASURED, str(LARGE)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stderr) < 1e9  # bytes, of which torch takes most; the weights have 141e9
    found = json.loads(done.stdout)
    assert found["model"]["parameters"] == 70_553_706_496 and found["processes"] == 64
    assert found["grid"] == {"pipe": 4, "data": 2, "tensor": 8}
    assert found["schedule"]["microbatches"] == 256
    assert found["schedule"]["bubble"] == pytest.approx(3 / 259, abs=2e-3)  # (p - 1) / (m + p - 1), stages nearly alike
    assert found["training"]["tokens_per_step"] == 2**22
    # ZeRO's paper: 2 bytes of weights, 4 of gradients, 12 / 2 of masters and state. All but the norms have 8 shards.
    norms = (2 * 80 + 1) * 8192
    states = sum(sum(row[kind] for kind in STATES) for row in found["memory"])
    assert states == ((70_553_706_496 - norms) // 8 + norms) * (2 + 4 + 12 // 2)


def test_the_text_of_explain_has_its_numbers() -> None:
    found = explain(resolve(read_training_file(LARGE, ["schedule=interleaved", "schedule.chunks=2"])[0]))
    shown = text(found)
    for stage in found["stages"]:
        assert f"{stage['layers'][0]} to {stage['layers'][1]}" in shown and f"{stage['parameters']:,}" in shown
    for row in found["memory"]:
        assert f"{row['total'] / 2**30:.2f}" in shown
    assert len(found["stages"]) == 8 and "interleaved" in shown


def test_the_docs_show_the_large_recipe() -> None:
    shown = text(explain(resolve(read_training_file(LARGE)[0])))
    assert f"```text\n{shown}\n```" in (ROOT / "docs" / "training-files.md").read_text()


def test_explain_fills_in_replicas_and_writes_notes() -> None:
    keys: dict[str, Any] = {"model": {"preset": "llama-tiny"}, "lora": {"rank": 2, "base": "nf4"}, "data": "tokens"}
    keys |= {"training": {"steps": 3}, "batch": {"size": 8, "balance": True}, "recompute": {"interval": 2}}
    file = TrainingFile.of(keys)
    assert explain(resolve(file, 4))["grid"]["data"] == 4
    notes = " ".join(explain(resolve(file))["notes"])
    assert (
        "--processes" in notes
        and "lora.base nf4: the frozen weights are counted" in notes
        and "each layer from its input" in notes
        and "one may have 1.25 times as many tokens" in notes
    )
    given = " ".join(explain(resolve(file, 1), 1)["notes"])
    assert "--processes" not in given


def test_options_of_explain_are_refused_without_it() -> None:
    assert "--json does nothing without --explain: give it" in run_triax("train", LARGE, "--json")[1]
    assert "--processes = 64: it belongs to --explain or --dry-run" in run_triax("train", LARGE, "--processes", 64)[1]


def test_explain_breaks_no_number_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explain(resolve(read_training_file(LARGE)[0]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    shown = text(found).replace("│", " ").split()
    kinds = [kind for kind in found["memory"][0] if kind != "pipe" and found["memory"][0][kind]]
    assert {"activations", "temporaries", "optimizer", *kinds} <= set(shown)
    assert {f"{row[kind] / 2**30:.2f}" for row in found["memory"] for kind in kinds} <= set(shown)
    assert {f"{stage['parameters']:,}" for stage in found["stages"]} <= set(shown)
