"""Network of a launched run: what listens, on which addresses, and what is read from it."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from triax.base.ports import is_loopback, resolve
from triax.grid.comm.tcp_store import serve_store
from triax.grid.launcher.elastic import elastic_rendezvous

from support.import_reader import library
from support.paths import ROOT
from support.processes import TRIAX, as_mpirun, free_port, started

# Each rank says that it is connected, and stays until it may end.
STAYS = """
import os, pathlib, sys, time
import torch
from triax.grid import Grid
grid = Grid(data=2)
grid.world.all_reduce(torch.ones(1))
pathlib.Path(f"ready-{grid.rank}").touch()
while not pathlib.Path("end").exists():
    time.sleep(0.02)
grid.world.barrier()
"""


def listening_sockets(port: int | None = None) -> dict[str, str]:
    """The links of sockets that listen for TCP connections, IPv4 and IPv6, and their addresses; None: on any port."""
    sockets: dict[str, str] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            words = line.split()
            address, _, number = words[1].partition(":")
            if words[3] == "0A" and port in (None, int(number, 16)):
                data = bytes.fromhex(address)
                # Words of 4 bytes, each in the order of this machine.
                ordered = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
                sockets[f"socket:[{words[9]}]"] = str(ipaddress.ip_address(ordered))
    return sockets


def links_of(process: Path) -> set[str]:
    """What the open files of a process, a folder of /proc, are links to."""
    found = set()
    with contextlib.suppress(OSError):
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(file))
    return found


def listening(session: int) -> set[str]:
    """The addresses on which the processes of a session listen for TCP connections, IPv4 and IPv6."""
    sockets, found = listening_sockets(), set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == session:
                found |= {sockets[link] for link in links_of(process) & sockets.keys()}
    return found


def replicas_of(processes: list[subprocess.Popen[str]]) -> set[int]:
    """The sessions of the replicas and the coordinator that launchers have started."""
    files = [Path(f"/proc/{each.pid}/task/{each.pid}/children") for each in processes]
    return {os.getsid(int(child)) for file in files for child in file.read_text().split()}


def listening_during(
    folder: Path, *commands: Sequence[object], script: str = STAYS, environments: Sequence[dict[str, str]] = ()
) -> set[str]:
    """Start a script by one or several commands; the addresses on which they listen when its ranks are connected."""
    (folder / "script.py").write_text(script)
    plain = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(*command, cwd=folder, env={**plain, **variables}))
            for command, variables in zip(commands, environments or [{}] * len(commands), strict=True)
        ]
        deadline = time.monotonic() + 60
        while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
            ended = next((process for process in processes if process.poll() is not None), None)
            assert ended is None, ended.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found = set[str]().union(*map(listening, {process.pid for process in processes} | replicas_of(processes)))
        (folder / "end").touch()
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, out + err
    return found


def test_a_run_on_one_host_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    assert listening_during(tmp_path, [*TRIAX, "run", "--nproc", 2, "script.py"]) == {"127.0.0.1"}


@pytest.mark.exhaustive
def test_ranks_of_mpirun_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    """The two processes as mpirun starts them: with its variables, and without a launcher of triax."""
    port, command = {"MASTER_PORT": str(free_port())}, [sys.executable, "script.py"]
    found = listening_during(tmp_path, command, command, environments=[as_mpirun(rank, 2) | port for rank in range(2)])
    assert found == {"127.0.0.1"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["hosts", "elastic"])
def test_several_hosts_listen_on_the_address_given(tmp_path: Path, way: str) -> None:
    """The launchers and ranks of two hosts, which are two addresses of this one, open nothing to other networks."""
    port = free_port()
    words: list[object] = [*TRIAX, "run", "--nproc", 1, "--nnodes", 2]
    if way == "elastic":
        words += ["--rdzv-endpoint", f"127.0.0.2:{port}", "--rdzv-conf", "last_call_timeout=1"]
        commands = [[*words, "--log-dir", f"logs-{node}", "script.py"] for node in range(2)]
    else:
        words += ["--master-addr", "127.0.0.2", "--master-port", port]
        commands = [[*words, "--log-dir", f"logs-{node}", "--node-rank", node, "script.py"] for node in range(2)]
    found = listening_during(tmp_path, *commands)
    assert "127.0.0.2" in found and all(map(is_loopback, found)), found


def test_a_store_listens_on_the_given_address_only() -> None:
    store = serve_store("127.0.0.3")
    store.set("key", "value")
    assert store.get("key") == b"value"
    # Another process may listen on a port of this number, on another address.
    sockets = listening_sockets(store.port)
    assert {sockets[link] for link in links_of(Path("/proc/self")) & sockets.keys()} == {"127.0.0.3"}
    with pytest.raises(OSError, match="in use"):
        serve_store("127.0.0.3", store.port)
    with pytest.raises(OSError, match="assign"):
        serve_store("192.0.2.1")  # an address of nobody, for documentation
    assert resolve("localhost") == "127.0.0.1" and is_loopback("::1") and not is_loopback("10.0.0.1")


# -------------------------------------------------------------------------------------------------------- no pickles

# From here on a pickle that this process reads is an error. (Not in pipes between a launcher and its ranks, whose
# reader has its own reference to the function.)
NO_PICKLES = """
import pickle
import torch.distributed.distributed_c10d as c10d
def refuse(*args, **options): raise AssertionError("a pickle was read")
class Refuses:  # other libraries make subclasses of it
    __init__ = refuse
pickle.loads = pickle.load = refuse
pickle.Unpickler = c10d._unpickler = Refuses
"""
# Whatever exchanges values between ranks: reports, checks, traces, checkpoints, gathered weights, Horovod's calls.
EXCHANGES = """
import sys
import torch, triax
from torch import nn
from triax.grid import Grid
from triax.models.gpt import GPTConfig, gpt_layers
from triax.models.huggingface.save import save_hf
from triax.engine.monitor.trace.comms_logger import summary
REPORTS = {
    "wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 1, "dump_state": True,
    "comms_logger": {"enabled": True}, "timeline": {"step": 1, "file": "trace.json"},
    "json_monitor": {"enabled": True, "output_path": "monitor"},
    "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "profile.txt"},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
def steps(engine, step, folder):
    for number in range(3):
        step()
    assert engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    engine.gather(), engine.gather("gradients")
    engine.save_16bit_model(folder)
def plain():
    grid = Grid(data=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, **REPORTS}
    engine, *_ = triax.initialize(model=model, config=config, grid=grid)
    def step():
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    steps(engine, step, "plain")
    summary(grid, show_straggler=True)
    try:
        engine.backward(engine(torch.full((2, 4), float("nan"))).mean())
        engine.step()
    except RuntimeError as error:
        assert "nan" in str(error)
def stages():
    gpt = GPTConfig(
        vocab_size=16, max_position_embeddings=4, hidden_size=8, num_attention_heads=2, num_hidden_layers=2
    )
    grid = Grid(pipe=2)
    module = triax.PipelineModule(gpt_layers(gpt), grid=grid, loss_fn=lambda x, y: x.float().mean())
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, **REPORTS}
    engine, *_ = triax.initialize(model=module, config=config)
    batch = (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))
    steps(engine, lambda: engine.train_batch(iter([batch] * 2)), "stages")
    engine.eval_batch(iter([batch] * 2), return_logits=True)
    save_hf(module, "hf", config=gpt)
def horovod():
    import triax.compat.horovod as hvd
    hvd.init()
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    try:
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="uneven")
    except ValueError as error:
        assert "same calls" in str(error)
    try:
        hvd.allgather_object("this one pickles")
    except Exception as error:
        assert "a pickle was read" in str(error)
        print("the object call read a pickle", flush=True)
plain()
stages()
horovod()
"""


def test_no_pickle_is_read_from_the_network(tmp_path: Path) -> None:
    """A run without Horovod's object functions unpickles nothing, in its ranks and in its launcher."""
    (tmp_path / "script.py").write_text(NO_PICKLES + EXCHANGES)
    (tmp_path / "start.py").write_text(
        f"if __name__ == '__main__':\n{textwrap.indent(NO_PICKLES, '    ')}"
        "    from pathlib import Path\n"
        "    from triax.grid.launcher.launch import launch\n"
        "    raise SystemExit(launch(Path('script.py'), ranks=2, logs=Path('logs')))\n"
    )
    run = subprocess.run([sys.executable, "start.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    said = "the object call read a pickle"
    assert said in run.stdout and said in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_pickle_in_the_rendezvous_of_hosts_is_not_read(tmp_path: Path) -> None:
    """Otherwise anyone who reaches the store of torch's rendezvous could run code as the user of a launcher."""
    port, victim = free_port(), tmp_path / "ran"
    code = b"cos\nsystem\n(S'touch " + os.fsencode(victim) + b"'\ntR."
    store = serve_store("127.0.0.1", port)
    backend = C10dRendezvousBackend(store, "job")
    store.set(backend._key, base64.b64encode(code).decode())
    settings = {"backend": "c10d", "endpoint": f"127.0.0.1:{port}", "run_id": "job", "min_nodes": 1, "max_nodes": 2}
    handler = elastic_rendezvous({**settings, "local_addr": "127.0.0.1", "join_timeout": "5"})
    with pytest.raises(Exception, match="corrupt"):
        handler.next_rendezvous()
    assert not victim.exists()


# ------------------------------------------------------------------------------------------------------- all the ports

# Every call of the library that opens a port, but those of `triax run`, in one process and the ranks of its pool.
OPENS = """
import os, pathlib, threading, time, torch
import triax
from triax.plugins.fault_tolerance.coordinator import Coordinator
from triax.engine.monitor.report.serve import report_server
from triax.testing.pool import run_ranks

def stays():
    torch.distributed.all_reduce(torch.ones(1))
    rank = torch.distributed.get_rank()
    pathlib.Path(f"ready-{rank}").touch()
    while not pathlib.Path("end").exists():
        time.sleep(0.02)

if __name__ == "__main__":
    coordinator = Coordinator(0, 1, 1.0, 1.0, b"secret")
    pathlib.Path("run.json").write_text("{}")
    pathlib.Path("metrics.jsonl").write_text('{"step": 1, "Train/Samples/train_loss": 1.0}')
    page = report_server([pathlib.Path(".")])
    address = f"127.0.0.1:{os.environ['PORT']}"  # of RemoteTeacher, serve_teacher and send_weights too
    groups = [None, None]
    def join(rank):
        groups[rank] = triax.transfer_group(address, rank, 2, timeout=60)
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    run_ranks(2, stays)
"""
# A replica of one process, whose ranks connect with those of the other one.
REPLICA = """
import pathlib, time, torch, triax
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(4), torch.ones(4)
engine = triax.Engine(
    triax.PipelineModule([triax.LayerSpec(torch.nn.Linear, 4, 4)], loss_fn=torch.nn.functional.mse_loss),
    optimizer=torch.optim.SGD, batch=triax.Batch(size=2, microbatch=2), training_data=Samples(), fault_tolerance={},
)
while len(engine.replicas.members) < 2:
    engine.train_batch()
pathlib.Path(f"ready-{engine.replicas.name}").touch()
while not pathlib.Path("end").exists():
    engine.train_batch()
    time.sleep(0.05)
engine.leave()
"""


@pytest.mark.parametrize(
    ("script", "words"), [(OPENS, [sys.executable]), (REPLICA, [*TRIAX, "run", "--replicas", 2, "--nproc", 1])]
)
def test_every_port_on_one_host_is_on_the_loopback_address(tmp_path: Path, script: str, words: list[object]) -> None:
    """Of the coordinator, of the stores of replicas, of ``transfer_group`` and of the pool."""
    command, variables = [*words, "script.py"], {"PORT": str(free_port())}
    assert listening_during(tmp_path, command, script=script, environments=[variables]) == {"127.0.0.1"}


def test_every_port_is_opened_by_one_helper() -> None:
    """Other places of the library may connect, or look for an address without listening."""
    opens = re.compile(r"\.listen\(|create_server\(|Server\(\(|is_master=(?!False)|TCPStore\([^)]*(True|rank == 0)")
    found = {file for file in library(ROOT) if opens.search(Path(ROOT, file).read_text())}
    helpers = {"base/ports.py", "grid/comm/tcp_store.py"}
    # A page on the loopback address; a store where MASTER_ADDR is no address of rank 0's host (docs/launch.md).
    assert found == helpers | {"engine/monitor/report/serve.py", "grid/grid.py"}
