"""Options of other libraries: the commands name their own in place of them; ``triax run`` ignores or refuses some."""

from __future__ import annotations

import logging
from typing import Any

from typer.core import TyperCommand

from ..base.errors import ConfigError

_GLOO = "ranks communicate through NCCL on GPUs and gloo on CPUs"
_RESPONSES = "there are no negotiated responses to cache or fuse: hvd.DistributedOptimizer fuses by buckets"
_BUFFERS = "buckets are set in the script: hvd.DistributedOptimizer, or zero_optimization.reduce_bucket_size"
_ELASTIC = "write --nnodes MIN:MAX with --rdzv-endpoint, so that hosts may join and leave"
_CORES = "each rank uses an equal share of the cores; write --threads, or numactl in --no-python"

# Option -> (its values on the command line, why it does nothing).
IDLE: dict[str, tuple[int, str]] = {
    "--gloo": (0, _GLOO),
    "--no-ssh-check": (0, "a host that ssh does not reach is reported at the start"),
    "--force-multi": (0, "a host of the hostfile is always reached by ssh"),
    "--autotuning": (1, "the section autotuning of the configuration acts without it, before the first step"),
    "--log-level": (1, 'logging.getLogger("triax").setLevel(...) sets what is logged'),
    "--quiet": (0, "the launcher prints the cause of a failure only"),
    "-q": (0, "the launcher prints the cause of a failure only"),
    "--verbose": (0, "every rank's output is in --log-dir"),
    "--disable-cache": (0, _RESPONSES),
    "--cache-capacity": (1, _RESPONSES),
    "--cycle-time-ms": (1, _RESPONSES),
    "--fusion-threshold-mb": (1, _BUFFERS),
    "--hierarchical-allreduce": (0, "NCCL chooses the algorithm of an all-reduce"),
    "--hierarchical-allgather": (0, "NCCL chooses the algorithm of an all-gather"),
    "--timeline-mark-cycles": (0, "there are no cycles to mark"),
    "--no-stall-check": (0, "Grid(timeout=...) sets after how many seconds a wait fails"),
    "--stall-check-warning-time-seconds": (1, "Grid(timeout=...) sets after how many seconds a wait fails"),
    "--stall-check-shutdown-time-seconds": (1, "Grid(timeout=...) sets after how many seconds a wait fails"),
}
# Option -> what to write instead.
REFUSED = {
    "--mpi": "start the script with mpirun: mpirun -np 4 python train.py",
    "--mpi-args": "start the script with mpirun: mpirun -np 4 python train.py",
    "--js": "start the script with srun, or with --hostfile",
    "--autotune": _BUFFERS,
    "--elastic-training": _ELASTIC,
    "--min-elastic-nodes": _ELASTIC,
    "--max-elastic-nodes": _ELASTIC,
    "--min-np": _ELASTIC,
    "--max-np": _ELASTIC,
    "--host-discovery-script": _ELASTIC,
    "--slots-per-host": "write the slots in the hostfile, or -H host1:2,host2:2",
    "--reset-limit": "write --max-restarts",
    "--bind-cores-to-rank": _CORES,
    "--bind-core-list": _CORES,
    "--venv-script": "every host runs this Python: activate the environment before triax run",
    "--save-pid": "write the process number in the shell: triax run ... & echo $! > FILE",
    "--ssh-identity-file": "write --launcher 'ssh -i FILE {host} {command}'",
    "--config-file": "write the options on the command line",
    "--check-build": "type triax env",
}
# triax's option -> what other libraries call it; a command suggests those of its own options.
EQUIVALENTS = {
    "--pipe": (
        *("--stages", "--num-stages", "--pp", "--pp-size", "--pipe-parallel-size", "--pipeline-parallel-size"),
        *("--pipeline-model-parallel-size", "--pipeline-parallel-degree"),
    ),
    "--tensor": (
        *("--tp", "--tp-size", "--mp-size", "--model-parallel-size", "--tensor-parallel-size"),
        *("--tensor-model-parallel-size", "--tensor-parallel-degree"),
    ),
    "--data": ("--dp", "--dp-size", "--replicas", "--data-parallel-size"),
    "--context": ("--cp", "--cp-size", "--context-parallel-size", "--context-parallel-degree"),
    "--expert": ("--ep", "--ep-size", "--expert-parallel-size", "--expert-model-parallel-size"),
    "--zero": ("--zero-stage", "--stage"),
    "--microbatches": ("--gas", "--gradient-accumulation-steps", "--num-microbatches", "--num-micro-batches"),
    "--chunks": ("--vpp", "--virtual-stages", "--num-virtual-stages-per-pipeline-rank"),
    "--gpus": ("--world-size", "--num-gpus", "--nproc"),
    "--nproc": ("--ngpus", "--world-size", "--nprocs"),
}


class Command(TyperCommand):
    """A command that suggests its own option for another library's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an unknown option's error names the option of this command that means the same."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's NoSuchOption, which typer has a copy of
            name = getattr(error, "option_name", "").replace("_", "-")
            mine = {option for parameter in self.params for option in parameter.opts}
            if same := [option for option, others in EQUIVALENTS.items() if name in others and option in mine]:
                vars(error)["possibilities"] = same
            raise


class RunCommand(Command):
    """The command ``triax run``, which names the reason and the replacement of other launchers' options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; leave out idle options with a warning.

        Raises:
            ConfigError: an option of another launcher that triax does not have.
        """
        while True:
            try:
                return super().parse_args(ctx, list(args))
            except Exception as error:  # click's NoSuchOption, which typer has a copy of
                name = getattr(error, "option_name", "")
                if name in REFUSED:
                    raise ConfigError(f"triax run has no {name}: {REFUSED[name]}.") from None
                if name not in IDLE:
                    raise
                values, why = IDLE[name]
                args = _without(args, name, values)
                logging.getLogger("triax").warning("triax run: %s does nothing: %s", name, why)


def _without(args: list[str], name: str, values: int) -> list[str]:
    """Return the arguments without an option and its values."""
    at = next(i for i, word in enumerate(args) if word.partition("=")[0].replace("_", "-") == name)
    return [*args[:at], *args[at + 1 + (0 if "=" in args[at] else values) :]]
