"""Record of bits: hashes of the losses, norms, gradients and weights of 75 runs, to compare two states of the library.

    python tests/laws/record.py                    compare with record.json, on a machine of the same kind
    python tests/laws/record.py --against HEAD~3   run the library of that commit too, on this machine, and compare
    python tests/laws/record.py --write            write record.json again, after a change that is meant to move numbers

A change that should not move the numbers shows equal bits in every run: grids of 1 to 8 ranks, ZeRO stages 0 to 3, five
schedules, plain modules, plain loops, context, experts, LoRA, offload, recomputation, compression and half precision.
The last bits of a product depend on the processor and on torch. Therefore record.json names both, and the program
compares it only where both are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch
from torch import Tensor

from triax.testing.pool import run_ranks

from support import five_axes
from support.compositions import Case, on_rank
from support.five_axes import Job, Place

HERE = Path(__file__).resolve()
FILE = HERE.with_suffix(".json")
STEPS = 3
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2}  # and their chunks
GPT = {"family": "gpt", "layers": 8, "dropout": 0.1}
PIPELINE = {"model": GPT, "inputs": "ids", "loss": "summed", "clip": 0.5, "optimizer": "AdamW", "steps": STEPS}
MODULE = {
    "engine": "module", "layers": [["linear"], ["layer_norm"], ["attention"], ["linear"]], "accumulation": 2,
    "clip": 0.5, "optimizer": "AdamW", "steps": STEPS,
}  # fmt: skip
OPTIONS: dict[str, Case] = {
    "lora": {"config": {"lora": {"rank": 2, "targets": ["c_attn", "c_fc"]}}},
    "offload": {"config": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}},
    "recompute": {"config": {"activation_checkpointing": {"granularity": "selective"}}},
    "fp16": {"precision": "fp16", "config": {"zero_optimization": {"stage": 2}}},
    "bf16": {"precision": "bf16", "config": {"zero_optimization": {"stage": 1}}},
    "autocast": {"precision": "autocast"},
    "powersgd": {"config": {"gradient_compression": {"type": "powersgd", "rank": 1, "min_compression": 1.0}}},
}


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the runs of one to three axes, with their names."""
    stages = {stage: {"zero_optimization": {"stage": stage, "reduce_bucket_size": 500}} for stage in range(4)}
    for grid in ([1, 1, 1], [1, 2, 1], [2, 2, 1], [2, 2, 2]):
        for stage, config in stages.items():
            yield f"pipeline {grid} stage {stage}", {
                **PIPELINE, "grid": grid, "accumulation": 2 * grid[0], "schedule": "1f1b", "config": config,
            }  # fmt: skip
    for schedule, chunks in SCHEDULES.items():
        for stage in (0, 1, 3):
            yield f"{schedule} stage {stage}", {
                **PIPELINE, "grid": [2, 2, 1], "accumulation": 4, "schedule": schedule, "chunks": chunks,
                "config": stages[stage],
            }  # fmt: skip
    for name, more in OPTIONS.items():
        for grid in ([1, 2, 1], [2, 1, 2]):
            if name != "powersgd" or grid[1] > 1:
                yield f"{name} {grid}", {**PIPELINE, "grid": grid, "accumulation": 4, "schedule": "1f1b", **more}
    for grid in ([1, 1, 1], [1, 2, 1], [1, 4, 1]):
        for stage, config in stages.items():
            yield f"module {grid} stage {stage}", {**MODULE, "grid": grid, "config": config}
    for stage in range(4):
        yield f"plain loop stage {stage}", {
            **MODULE, "engine": "optimizer", "grid": [1, 2, 1], "config": {"stage": stage, "bucket_size": 50},
        }  # fmt: skip


def five() -> Iterator[tuple[str, five_axes.Cell]]:
    """Yield the runs with context and expert axes, with their names."""
    job = Job(capacity=True, packed=True)
    for kind in ("ring", "ulysses", "gather"):
        yield f"context {kind}", (job, Place(context=2, kind=kind, microbatches=2))
    for stage in range(4):
        yield f"experts stage {stage}", (job, Place(data=2, expert=2, stage=stage, microbatches=2))
        yield f"five axes stage {stage}", (
            job, Place(pipe=2, data=2, tensor=2, expert=2, stage=stage, sequence_parallel=True, microbatches=4),
        )  # fmt: skip
        yield f"context and experts stage {stage}", (
            Job(tied=True), Place(data=2, context=2, tensor=2, expert=4, stage=stage, microbatches=2),
        )  # fmt: skip


def digest(value: Any) -> str:
    """Return a hash of the bits of a nest of tensors and numbers."""
    found = hashlib.sha256()
    _add(found.update, value)
    return found.hexdigest()[:16]


def _add(update: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value):
            update(repr(key).encode())
            _add(update, value[key])
    elif is_dataclass(value):
        _add(update, {key: each for key, each in vars(value).items() if key != "layout"})
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            _add(update, each)
    else:
        update(repr(value).encode())


def case_digests(case: Case) -> dict[str, str]:
    """Hashes of what one rank of a run of one to three axes found, by part."""
    with tempfile.TemporaryDirectory() as scratch:
        return _parts(on_rank(case, 0, STEPS, scratch=scratch))


def _parts(found: dict[str, Any]) -> dict[str, str]:
    steps = [_tensors(step) for step in found.get("steps", ())]  # of a plain loop rank 0 alone has them
    return {
        "initial": digest(_tensors(found.get("initial", {}))),
        "losses": digest([step[:2] for step in steps]),
        "gradients": digest([step[2] for step in steps]),
        "weights": digest([*(step[3] for step in steps), found["digests"]]),
    }


def _tensors(value: Any) -> Any:
    """Return a nest in which a parameter's (layout, shard) is its shard."""
    if isinstance(value, dict):
        return {key: each[1] if isinstance(each, tuple) else each for key, each in value.items()}
    return tuple(map(_tensors, value)) if isinstance(value, tuple) else value


def cell_digests(cell: five_axes.Cell) -> dict[str, str]:
    """Hashes of what one rank of a run of five axes found, by part."""
    found = five_axes.train(*cell)
    return {
        "initial": digest(_tensors(found.initial)),
        "losses": digest([found.losses, found.norms, found.auxiliary, found.loads]),
        "gradients": digest([_tensors(each) for each in found.gradients]),
        "weights": digest([_tensors(found.weights), found.buffers]),
    }


def record() -> dict[str, list[dict[str, str]]]:
    """Run everything. Name of the run -> hashes of each rank."""
    jobs: list[tuple[str, int, Any]] = [
        *((name, math.prod(case["grid"]), partial(case_digests, case)) for name, case in cases()),
        *((name, cell[1].ranks, partial(cell_digests, cell)) for name, cell in five()),
    ]
    found = {}
    for number, (name, ranks, job) in enumerate(jobs, 1):
        print(f"\r{number} of {len(jobs)}: {name:50}", end="", file=sys.stderr, flush=True)
        found[name] = run_ranks(ranks, job, timeout=120)
    print(file=sys.stderr)
    return found


def machine() -> dict[str, str]:
    """Describe all that the last bits of a product depend on, beside the library."""
    return {
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def record_of(commit: str) -> dict[str, list[dict[str, str]]]:
    """Run everything with the library of a commit, under this Python."""
    with tempfile.TemporaryDirectory() as folder:
        checkout, file = Path(folder) / "triax", Path(folder) / "record.json"
        root = HERE.parent.parent.parent
        subprocess.run(["git", "-C", root, "worktree", "add", "--quiet", "--detach", checkout, commit], check=True)
        try:
            program: list[str | Path] = [sys.executable, checkout / "tests/laws/record.py", "--write", "--file", file]
            subprocess.run(program, env={"PYTHONPATH": folder}, cwd=folder, check=True)
        finally:
            subprocess.run(["git", "-C", root, "worktree", "remove", "--force", checkout], check=True)
        return dict(json.loads(file.read_text())["runs"])


def compare(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return a line for each run that differs, with the first part of it that does."""
    lines = [f"{name}: missing" for name in sorted(wanted.keys() - found.keys())]
    for name in found.keys() & wanted.keys():
        for part in ("initial", "losses", "gradients", "weights"):
            unlike = [
                r
                for r, pair in enumerate(zip(found[name], wanted[name], strict=True))
                if pair[0][part] != pair[1][part]
            ]
            if unlike:
                lines.append(f"{name}: {part} of ranks {unlike} differ")
                break
    return sorted(lines)


def main() -> int:
    """Run the program. Exit status 1: a run differs; 2: there is nothing on this machine to compare with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with the library of this commit")
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--file", type=Path, default=FILE, help="the file of hashes (record.json beside the program)")
    options = parser.parse_args()
    if options.write:
        content = {"machine": machine(), "runs": record()}
        options.file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        return 0
    if options.against:
        wanted = record_of(options.against)
    else:
        content = json.loads(options.file.read_text())
        if content["machine"] != machine():
            print(f"{options.file} is of {content['machine']}, this machine is {machine()}: use --against COMMIT")
            return 2
        wanted = content["runs"]
    lines = compare(record(), wanted)
    print("\n".join(lines) or f"all {len(wanted)} runs have equal bits")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
