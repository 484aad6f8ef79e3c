"""``triax env``: versions, devices and backends of this machine, and what is missing for which feature."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..base.errors import to_install
from ..base.tables import table, terminal

# Package -> what needs it, and how to install it.
_OPTIONAL = {
    "tensorboard": ("the section tensorboard of a configuration", to_install("tensorboard")),
    "wandb": ("the section wandb of a configuration", to_install("wandb")),
    "mlflow": ("monitor.writers of a training file", "pip install mlflow"),
    "trackio": ("monitor.writers of a training file", "pip install trackio"),
    "transformers": ("Hugging Face's models and triax.Trainer", to_install("hf")),
    "accelerate": ("triax.Trainer, and scripts of Hugging Face's Accelerate", to_install("hf")),
    "lm_eval": ("triax evaluate, and evaluate.tasks of training files", to_install("eval")),
    "datasets": ("Hugging Face's data sets", "pip install datasets"),
    "matplotlib": ("triax schedule --plot", to_install("plot")),
    "pyarrow": ("Parquet and Arrow files of triax data tokenize", to_install("data")),
    "fsspec": ("checkpoints in a bucket", to_install("remote")),
}
# Command -> what needs it.
_COMMANDS = {
    "ssh": "triax run --hostfile, on several hosts",
    "mpirun": "mpirun python train.py, in place of triax run",
    "srun": "srun python train.py, in place of triax run",
}


def env() -> None:
    """Print versions, devices and backends, and what is missing for each feature."""
    out = terminal()
    for title, rows in (("Versions", _versions()), ("Devices", _devices()), ("Backends", _backends())):
        out.print(table(("", ""), rows, title, left=2, show_header=False))
    out.print(table(("part", "here", "needed for", "to install"), _optional(), "Optional parts", left=4))


def _versions() -> Iterator[tuple[str, str]]:
    from ..base import VERSION

    yield "triax", f"{VERSION}, in {Path(__file__).resolve().parent.parent}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in ("torch", "numpy", "safetensors", "pydantic"):
        yield package, _version(package) or "missing"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    from ..grid.devices import gpu_descriptions
    from ..grid.launcher.launch import cores

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "CPU", f"{cores()} cores for this process, {memory / 2**30:.1f} GiB memory, {torch.get_num_threads()} threads"
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield "/dev/shm", f"{shutil.disk_usage(shared).free / 2**30:.1f} GiB free, for data loader processes and NCCL"
    yield from gpu_descriptions()


def _backends() -> Iterator[tuple[str, str]]:
    import torch.distributed as dist

    from ..grid.environment import socket_interfaces

    yield "torch.distributed", "available" if dist.is_available() else "missing: only one process can run"
    for name, there, use in (
        ("gloo", dist.is_gloo_available(), "collectives on CPUs"),
        ("nccl", dist.is_nccl_available(), "collectives on GPUs"),
        ("mpi", dist.is_mpi_available(), "not used by triax"),
    ):
        yield name, f"{'available' if there else 'not in this torch'}: {use}"
    named = socket_interfaces()
    yield "network interface", ", ".join(f"{k}={v}" for k, v in named.items()) or "chosen by address"


def _optional() -> Iterator[tuple[str, str, str, str]]:
    for package, (use, install) in _OPTIONAL.items():
        version = _version(package)
        yield package, version or "missing", use, "" if version else install
    for command, use in _COMMANDS.items():
        path = shutil.which(command)
        yield command, path or "missing", use, ""
    yield "kernels", "none to build", "triax is plain PyTorch: no extension is compiled", ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
