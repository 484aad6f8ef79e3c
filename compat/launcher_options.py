"""Names of options of torchrun, ``deepspeed``, ``horovodrun`` and Megatron-LM, for triax's commands. Tables alone."""

from __future__ import annotations

# Option of triax run -> its names in other launchers.
SAME = {
    "--nproc": ("--nproc-per-node", "--num-gpus", "--num-accelerators"),
    "-np": ("--num-proc",),
    "--nnodes": ("--num-nodes",),
    "--hostfile": ("-hostfile", "--hosts", "-H"),
    "--include": ("-i",),
    "--exclude": ("-e",),
    "--log-dir": ("--output-filename", "--enable-each-rank-log"),
    "--timeline": ("--timeline-filename",),
    "--wait": ("--start-timeout",),
}
# Option of another launcher -> the number of its values, and the options of triax run in its place, {} for the value.
_INTERFACE = (1, ("--export", "GLOO_SOCKET_IFNAME={}", "--export", "NCCL_SOCKET_IFNAME={}"))
REPLACED: dict[str, tuple[int, tuple[str, ...]]] = {
    "--standalone": (0, ("--nnodes", "1")),
    "--rdzv-backend": (1, ("--rdzv-conf", "backend={}")),
    "--rdzv-id": (1, ("--rdzv-conf", "run_id={}")),
    "--ssh-port": (1, ("--launcher-args", "-p {}")),
    "-p": (1, ("--launcher-args", "-p {}")),
    "--network-interface": _INTERFACE,
    "--network-interfaces": _INTERFACE,
}

_GLOO = "ranks communicate through NCCL on GPUs and gloo on CPUs"
_RESPONSES = "there are no negotiated responses to cache or fuse: hvd.DistributedOptimizer fuses by buckets"
_BUFFERS = "buckets are set in the script: hvd.DistributedOptimizer, or zero_optimization.reduce_bucket_size"
_ELASTIC = "write --nnodes MIN:MAX with --rdzv-endpoint, so that hosts may join and leave"
_CORES = "each rank uses an equal share of the cores; write --threads, or numactl in --no-python"

# Option -> the number of its values, and why it does nothing.
IDLE: dict[str, tuple[int, str]] = {
    "--gloo": (0, _GLOO),
    "--no-ssh-check": (0, "a host that ssh does not reach is reported at the start"),
    "--no-ssh": (0, "--node-rank starts this host of the hostfile only"),
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
# DeepSpeed's launchers that start the ranks themselves -> what to type.
STARTERS = dict.fromkeys(("openmpi", "mpich", "impi", "mvapich"), "start the script with mpirun -np N python SCRIPT")
STARTERS["slurm"] = "start the script with srun -n N python SCRIPT"
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
