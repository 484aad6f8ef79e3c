"""The benchmarks run, on sizes at which their times mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import BENCHMARKS


def run(script: str, *args: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_pipeline_benchmark_times_and_prints_each_schedule(capsys: Any, monkeypatch: Any) -> None:
    args = ("--stages", "2", "--stacks", "smoke", "--rounds", "2", "--microbatches", "4", "--only", "triax", "1F1B")
    # Gradients were those of plain autograd, and activations those of the simulation, or it would have failed.
    (found,) = json.loads(run("pipeline.py", *args, "--json"))["results"].values()
    rows = {row["name"]: row for row in found}
    triax = {"triax 1f1b", "triax zb-h1", "triax interleaved", "triax zb-v"}
    assert rows.keys() == triax | {"torch Schedule1F1B", "one process"}
    assert rows["triax zb-v"]["activations"] == [2, 2]
    assert all(len(row["times"]) == 2 and min(row["times"]) > 0 for row in rows.values())

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from pipeline import PipelineRow, show_pipeline

    show_pipeline([PipelineRow(**row) for row in found], "smoke", 2)
    table = capsys.readouterr().out
    assert all(name in table for name in rows) and "ratio to torch Schedule1F1B" in table


@pytest.mark.exhaustive
def test_the_zero_benchmark_times_triax_ddp_and_fsdp() -> None:
    args = ("--stack", "smoke", "--data", "2", "--rounds", "2", "--only", "triax", "FSDP2", "--json")
    # Gradients were those of plain autograd, or it would have failed.
    (rows,) = json.loads(run("zero.py", *args))["results"].values()
    names = [row["name"] for row in rows]
    assert names[0] == "DDP" and sum("triax stage" in name for name in names) == 8 and "FSDP2, resharding" in names
    assert all(len(row["times"]) == len(row["sent"]) == 2 for row in rows)


@pytest.mark.exhaustive
def test_the_timeline_benchmark_draws_measured_and_simulated(tmp_path: Path) -> None:
    plot = tmp_path / "timeline.png"
    args = ("--stages", "2", "--microbatches", "3", "--steps", "3", "--milliseconds", "0.2")
    report = run("timeline.py", *args, "--schedules", "zb-v", "--plot", str(plot))
    assert "measured" in report and "simulated" in report
    assert plot.stat().st_size > 10_000


@pytest.mark.exhaustive
def test_the_checkpoint_benchmark_compares_with_dcp(tmp_path: Path) -> None:
    args = ("--width", "32", "--layers", "2", "--rounds", "1", "--folder", str(tmp_path))
    # What was loaded was what was saved, or it would have failed.
    found = json.loads(run("checkpoint.py", *args, "--only", "triax", "DCP"))
    assert found["ranks"] == 2 and len(found["median seconds"]) == 4 and found["bytes a parameter"]["triax"] > 12
    found = json.loads(run("checkpoint.py", *args, "--behind"))
    assert found["steps a block"] > 0 and found["cost of a step"] > 0 and found["the copy, in ms"] > 0


@pytest.mark.exhaustive
def test_the_checkpoint_benchmark_measures_the_main_job(tmp_path: Path) -> None:
    found = json.loads(run("checkpoint.py", "--main-job", "--steps", "1", "--rounds", "1", "--folder", str(tmp_path)))
    assert (found["ranks"], found["parameters"], found["steps a block"]) == (8, 842_496, 1)


@pytest.mark.exhaustive
def test_the_tensor_benchmark_times_and_counts_bytes() -> None:
    args = ("--models", "smoke", "--ranks", "2", "--rounds", "2", "--json")
    # Gradients were those of one process, or it would have failed.
    (rows,) = json.loads(run("tensor.py", *args))["results"].values()
    found = {row["name"]: row for row in rows}
    assert len(found) == 6 and all(len(row["times"]) == len(row["sent"]) == 2 for row in rows)
    # On sequence shards half of what one process holds, but for each token's two integers and the loss's few numbers.
    alone, shards = (found[name]["held"][0] for name in ("one process", "triax, sequence parallel"))
    assert 0.5 <= shards / alone < 0.55
    assert found["triax"]["counted"] > 0


@pytest.mark.exhaustive
def test_the_context_benchmark_times_and_counts_scores() -> None:
    args = ("--models", "smoke", "--ranks", "2", "--rounds", "2", "--json")
    # Gradients were those of one process, or it would have failed.
    (rows,) = json.loads(run("context.py", *args))["results"].values()
    found = {row["name"]: row for row in rows}
    assert all(bool(row["problem"]) != (len(row["times"]) == len(row["sent"]) == 2) for row in rows)
    ran = {name for name, row in found.items() if row["times"]}
    triax = {"triax, ring", "triax, ulysses", "triax, gather"}
    assert ran >= triax | {"one process", "keys gathered, by hand", "Ulysses, by hand", "torch's ring, called directly"}
    # 2 sequences, 4 heads, 32 tokens: each rank computes half of the scores under the diagonal.
    assert all(found[name]["scores"] == [2 * 4 * 32 * 33 // 4] * 2 for name in triax)
    alone = found["one process"]
    assert alone["scores"] == [2 * 4 * 32 * 33 // 2, 0] and all(
        found[name]["peak"][0] >= found[name]["held"][0] > 0 for name in ran
    )
    assert found["triax, ring"]["held"][0] < 0.6 * alone["held"][0]
    table = run("context.py", *args[:-1])
    assert all(name in table for name in found) and "balance" in table


@pytest.mark.exhaustive
def test_the_moe_benchmark_times_and_counts_bytes() -> None:
    args = ("--models", "smoke", "--ranks", "2", "--rounds", "2", "--json")
    # Gradients were those of one process, or it would have failed.
    (rows,) = json.loads(run("moe.py", *args))["results"].values()
    assert [row["name"] for row in rows] == ["one process", "triax", "all-to-all by hand", "DeepSpeed"]
    assert all(bool(row["problem"]) != (len(row["times"]) == len(row["sent"]) == 2) for row in rows)
    assert all(min(row["held"]) > 0 for row in rows[:3])


@pytest.mark.exhaustive
def test_the_cuts_benchmark_compares_partitions() -> None:
    (rows,) = json.loads(run("cuts.py", "--cases", "slow rank, asleep", "--rounds", "1", "--json"))["results"].values()
    assert [row["name"] for row in rows] == ["uniform", "parameters", "by hand", "time", "auto"]
    assert rows[0]["boundaries"] == [0, 6, 12] and rows[3]["boundaries"] in ([0, 8, 12], [0, 9, 12])
    assert min(row["times"][0] for row in rows) > 0 and rows[3]["simulated"] < rows[0]["simulated"]


@pytest.mark.exhaustive
def test_the_local_updates_benchmark_counts_steps_of_replicas() -> None:
    """One replica, then one beside a replica that is 10 times slower; a step takes at least 2 ms, or 20 ms."""
    args = ("--every", "2", "--step", "0.002", "--seconds", "0.3", "--fast", "1", "--types", "async_diloco", "--json")
    alone, beside = json.loads(run("local_updates.py", *args))["results"]
    (rate,), (fast, slow) = alone["each"], beside["each"]
    assert 0 < rate < 1 / 0.002 and 0 < fast < 1 / 0.002 and 0 < slow < 1 / 0.020
    assert alone["total"] == rate and beside["total"] == pytest.approx(fast + slow)
    assert alone["share"] == 1 and beside["share"] == pytest.approx((fast + slow) / rate)
    assert min(alone["rounds"] + beside["rounds"]) >= 1


@pytest.mark.exhaustive
def test_the_data_benchmark_compares_with_datasets() -> None:
    args = ("--lengths", "64", "--rounds", "2", "--tokens", "5000", "--files", "20", "--vocab-size", "300", "--json")
    found = json.loads(run("data.py", *args))
    rates = found["results"]["64"]
    assert found["documents"] > 5 and [*rates] == [
        *("triax", "triax, no masks", "datasets, blocks", "datasets, documents")
    ]
    assert all(len(each) == 2 and min(each) > 0 for each in rates.values())


@pytest.mark.exhaustive
def test_the_compression_benchmark_writes_its_table(tmp_path: Path) -> None:
    table, text = tmp_path / "table.md", tmp_path / "text.py"
    table.write_text("before\n<!-- benchmarks/gradient_compression.py -->\nold\n<!-- end -->\nafter\n")
    text.write_text("def f(x):\n    return x + 1\n" * 99)
    (tmp_path / "other.py").write_text(text.read_text())
    sizes = ("--layers", "1", "--width", "16", "--heads", "2", "--sequence", "16", "--batch", "2", "--microbatch", "1")
    rest = ("--steps", "2", "--data", "2", "--validation", "2", "--runs", str(tmp_path), "--table", str(table))
    command = ("gradient_compression.py", *sizes, *rest, "--text", str(tmp_path), "--methods", "none,bf16")
    first, second = run(*command), run(*command)  # the second time, the results are there already
    assert "bf16: step 2" in first and "step 2" not in second
    lines = table.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    none, narrow = (line for line in lines if line.startswith(("| none |", "| bf16 |")))
    assert "| 1/1.0 |" in none and "| 1/2.0 |" in narrow


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [("--size", "smoke"), ("--overhead",)])
def test_the_device_benchmark_times_each_contender(options: tuple[str, ...]) -> None:
    report = json.loads(run("device.py", "--device", "cpu", *options, "--rounds", "2", "--steps", "2", "--json"))
    rows = {row["name"]: row for row in report["results"]}
    assert report["flops"] > 0 and report["product_flops"] > 0
    names = [f"triax train_batch, stage {stage}" for stage in (0, 1, 3)]
    assert [*rows] == ["bare", *names, "triax plain module, stage 1", "FSDP2", "DeepSpeed, stage 1"]
    assert {name for name, row in rows.items() if row["problem"]} <= {"DeepSpeed, stage 1"}
    assert all(len(row["times"]) == 2 and min(row["times"]) > 0 for row in rows.values() if not row["problem"])


# The learning rate is such that the weights move by much more than their rounding to bf16.
MOVED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import device, torch
from rounds import NotRunning
device.LR, moved = 1e-2, {}
job = device.Job(device.SIZES["smoke"], 1, torch.device("cpu"), False)
start = {name: weight.detach().clone() for name, weight in job.model().named_parameters()}
for name, make in device.CONTENDERS.items():
    try:
        step, weights = make(job)
    except NotRunning:
        continue
    for _ in range(3):
        step()
    found = weights()
    moved[name] = torch.cat([(found[key].detach().float() - start[key]).flatten() for key in start])
print(json.dumps({name: float((each - moved["bare"]).norm() / moved["bare"].norm()) for name, each in moved.items()}))
"""


@pytest.mark.exhaustive
def test_contenders_of_the_device_benchmark_step_as_a_bare_loop() -> None:
    """How far the weights are from the bare loop's after three steps, as a share of how far those have moved."""
    command = [sys.executable, "-W", "ignore", "-c", MOVED, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) >= 6 and all(error < 0.05 for error in errors.values()), errors


@pytest.mark.exhaustive
def test_the_growth_benchmark_measures_each_row(tmp_path: Path) -> None:
    """Two sizes of each row; the picture is drawn. How fast a row grows is not asserted: it is a time."""
    found = json.loads(run("growth.py", "--largest", "4", "--json", "--plot", str(tmp_path / "growth.png")))
    assert len(found) == 11 and all(len(row["seconds"]) == 2 for row in found.values())
    assert all(min(row["seconds"].values()) > 0 for row in found.values()) and (tmp_path / "growth.png").exists()
