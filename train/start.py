"""Start of a run: as one rank of torchrun, ``triax run`` or srun, or with ranks of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..base.errors import ConfigError
from ..base.hub import local_folder
from ..base.option_error import OptionError
from ..checkpoint.format.remote import folder_at
from ..data.tokenizer import open_tokenizer
from ..engine.setup.check_names import try_names
from ..grid.devices import accelerators
from ..grid.environment import read_environment
from ..grid.launcher.launch import TRAINING, launch
from ..models.huggingface.config import to_hf
from .data import check_data
from .drawing import reward_functions
from .job import Job, resolve
from .loop import train
from .sections import TrainingFile
from .text_data import with_tokens

# Modules that the ranks import, once, in the server that they are forks of.
PRELOAD = (*TRAINING, "numpy", "rich.live", "triax.train.loop")

_MOST = 4096  # processes that one host starts


def make_job(file: TrainingFile, processes: int | None = None) -> Job:
    """Return the run of a training file on this machine, with every check that needs no ranks.

    Args:
        file: the training file.
        processes: number of processes to start; None: as many as the grid has. A launcher's number goes before it.

    Raises:
        ConfigError: keys that cannot be used; the message names them.
    """
    file = with_tokens(file)
    environment = read_environment()
    processes = processes if environment is None else environment.world_size
    job = resolve(file, processes, accelerators() or 1)
    try:
        try_names(job.options)
    except OptionError as error:
        raise ConfigError(error.spelled(job.options.names)) from error
    if environment is None and job.topology.world_size > _MOST:
        raise ConfigError(
            f"grid is one of {job.topology.world_size} processes, which this host would start: give smaller axes, or "
            "start them on several hosts by srun, torchrun or triax run"
        )
    faults = job.options.fault_tolerance
    if faults is not None and not faults.replica:
        raise ConfigError(
            "fault_tolerance: this process has no replica's name: start the run by triax run --replicas 2 --nproc "
            f"{job.topology.world_size} --no-python triax train FILE, or set TRIAX_REPLICA and TRIAX_COORDINATOR for "
            "each replica (docs/faults.md)"
        )
    section = job.file.model
    if section.has_weights and not any(local_folder(str(section.folder), weights=True).glob("*.safetensors")):
        raise ConfigError(
            f"model.folder {section.folder} has no *.safetensors, so no weights: give a folder that has them, or "
            "model.weights=false to train its shape from random weights"
        )
    if job.export is not None and not file.model.has_weights and not file.data.images:
        try:
            to_hf(job.model)
        except ValueError as error:
            raise ConfigError(f"export cannot write this model: {error} Or write export: false") from error
    if job.checkpoints is not None:
        try:
            folder_at(job.checkpoints)
        except ConfigError as error:
            raise ConfigError(f"checkpoint.folder: {error}") from error
    _, _, tokenizer = check_data(file, job.sequence, job.tokenizer, job.model.vocab_size)
    if file.method is not None and file.method.name == "grpo":
        reward_functions(job)
    if file.sample is not None and tokenizer is None:
        raise ConfigError(
            "sample needs the tokenizer that made the tokens, which is no longer in its place: give tokenizer, or "
            "leave sample out"
        )
    if file.sample is not None and tokenizer is not None:
        (prompt,) = open_tokenizer(tokenizer, "none").encode([file.sample.prompt])
        if not 0 < len(prompt) < job.model.max_position_embeddings:
            raise ConfigError(
                f"sample.prompt has {len(prompt)} tokens, but it needs at least 1, and the model's "
                f"{job.model.max_position_embeddings} positions must leave room for another: give another prompt"
            )
    return job


def start(job: Job, target: Callable[[Job], object] = train) -> None:
    """Be a rank of the run if a launcher started this process; else start its ranks, wait, and exit.

    Args:
        job: the run.
        target: function of one rank, at the top level of a module.
    """
    if read_environment() is not None or job.topology.world_size == 1:
        target(job)
        return
    ranks = job.topology.world_size
    sys.exit(launch(target, job, ranks=ranks, topology=job.topology, logs=job.folder, preload=PRELOAD))
