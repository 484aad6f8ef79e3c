"""Start of a run: as one rank of torchrun, ``triax run`` or srun, or with ranks of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..checkpoint.format.remote import folder_at
from ..engine.setup.check import read_config
from ..grid.environment import read_environment
from ..grid.errors import ConfigError
from ..grid.grid import gpus
from ..launcher.launch import launch
from .data import check_data
from .job import Job, resolve
from .loop import train
from .schema import TrainingFile

# Modules that the ranks import, once, in the server that they are forks of.
PRELOAD = ("numpy", "rich.live", "triax.train.loop")


def make_job(file: TrainingFile) -> Job:
    """Return the run of a training file on this machine, with every check that needs no ranks.

    Raises:
        ConfigError: keys that cannot be used; the message names them.
    """
    environment = read_environment()
    processes = None if environment is None else environment.world_size
    job = resolve(file, processes, gpus() or 1)
    read_config(job.engine)
    if job.checkpoints is not None:
        try:
            folder_at(job.checkpoints)
        except ConfigError as error:
            raise ConfigError(f"checkpoint.folder: {error}") from error
    _, _, tokenizer = check_data(file, job.sequence, job.tokenizer, job.model.vocab_size)
    if file.sample is not None and tokenizer is None:
        raise ConfigError(
            "sample needs the tokenizer that made the tokens, which is not where it was: give tokenizer, or leave "
            "sample out"
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
