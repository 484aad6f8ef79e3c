"""Program of one rank of the pool. The side of the tests, and the idea, are in ``pool.py``.

The fork server imports this file once, and with it what tests use and what takes long to import. Each rank is then a
fork of that server, which costs milliseconds, where an ``import torch`` costs seconds.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import logging
import marshal
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.torch_private import restart_group_count

PRELOAD = (
    "torch._dynamo",  # which the first optimizer of a process imports, in 2 s
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.optim",
    "torch.testing",
    "einops._torch_specific",
    "hypothesis",
    "pydantic",
    "pytest",
    "safetensors.torch",
    "triax.compat.deepspeed.from_config",
    "triax.models.gpt",
    "triax.models.llama",
    "triax.pipe",
    "triax.tensor_parallel",
)

# A pool that runs a job or two without an engine is ready sooner without them.
for _name in PRELOAD if os.environ.get("TRIAX_POOL_PRELOAD") != "none" else ():
    # What cannot be imported here is somebody's test failure later, with its own message; it must not take
    # the whole pool down.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# None of that is garbage: so a rank looks through what its jobs made only, and that in milliseconds.
gc.collect()
gc.freeze()


# ------------------------------------------------------------------------- values between processes


Address = tuple[str, str | None, int, str]  # of a module: its name, file, date, and the file of its code


def dump(value: object, address: Callable[[types.ModuleType], Address] | None = None) -> bytes:
    """Pickle by value: a tensor travels as its numbers, never as a shared-memory file descriptor.

    Args:
        value: the value.
        address: returns the address of a module. With it, functions and classes of users' files travel by it, because
            a rank may not find such a file by the name of its module.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.address = address
    pickler.dump(value)
    return buffer.getvalue()


def _at(address: Address, qualname: str) -> Any:
    """Return a function or class of a module."""
    return resolve(_load(*address), qualname)


class _Pickler(pickle.Pickler):
    address: Callable[[types.ModuleType], Address] | None = None

    def reducer_override(self, obj: Any) -> Any:
        if self.address is not None and isinstance(obj, (types.FunctionType, type)):
            module = sys.modules.get(obj.__module__)
            if module is not None and _is_users(module):
                with contextlib.suppress(AttributeError):
                    if resolve(module, obj.__qualname__) is obj:
                        return _at, (self.address(module), obj.__qualname__)
            return NotImplemented
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if obj.device.type != "cpu" or obj.layout != torch.strided:
            return NotImplemented
        # Only the elements that the tensor shows, not the storage it is a view of; and no autograd graph.
        flat = obj.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return _tensor, (flat.numpy(), obj.dtype, tuple(obj.shape))


def _tensor(numbers: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not numbers.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(numbers.copy()).view(dtype).view(shape)


# ------------------------------------------------------------------------- functions by (file, name)


@functools.cache
def compiled(path: str, mtime_ns: int, folder: str) -> str:
    """File with the code of a test file, which the parent compiles once for all ranks."""
    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    with contextlib.suppress(ImportError):
        # pytest's rewriting, so that `assert a == b` on a rank also says what a and b were.
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, path)
    code = Path(folder, f"{Path(path).stem}-{uuid.uuid4()}.code")
    code.write_bytes(marshal.dumps(compile(tree, path, "exec")))
    return str(code)


@functools.cache
def _load(name: str, path: str | None, mtime_ns: int, code: str) -> types.ModuleType:
    """Import module `name`; a test file is loaded from its code, once for each date of the file."""
    if path is None:
        return importlib.import_module(name)
    if not is_test_file(path):
        with contextlib.suppress(ImportError, ValueError):
            known = importlib.import_module(name)
            if getattr(known, "__file__", None) == path:
                return known
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    try:
        exec(marshal.loads(Path(code).read_bytes()), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def is_test_file(path: str | None) -> bool:
    """Return True for a file that pytest collects or loads itself: its module may have a name that no import finds."""
    name = Path(path or "").name
    return name.startswith(("test_", "conftest")) or name.endswith("_test.py")


def _is_users(module: types.ModuleType) -> bool:
    """Return True for a module of a user's file: not of triax, of the standard library, or installed."""
    path = getattr(module, "__file__", None)
    if path is None or module.__name__.partition(".")[0] in {"triax", *sys.stdlib_module_names}:
        return False
    return "site-packages" not in Path(path).parts


def resolve(module: types.ModuleType, qualname: str) -> Any:
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


# ------------------------------------------------------------------------------------- a rank's life


def serve(rank: int, pipe: connection.Connection, dump_path: str, filterwarnings: tuple[str, ...]) -> None:
    """Wait for a job, run it, send what came of it; until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.environ.pop("PYTHONPATH", None)  # set for the fork server alone, see pool.py
    _wake_without_preempting()
    _leave_with_parent()
    for line in filterwarnings:
        action, _, rest = line.partition(":")
        message, kind, module = [*rest.split(":"), "", "", ""][:3]
        warnings.filterwarnings(action, message, _warning(kind), module)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    stand = open(dump_path, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stand)
    pipe.send_bytes(dump(("ready", None)))
    while True:
        faulthandler.unregister(signal.SIGUSR1)  # a job, such as one that saves at this signal, may have replaced it
        faulthandler.register(signal.SIGUSR1, file=stand, all_threads=True)
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        with _clean_room(rank, job):
            outcome = _attempt(job, rank)
            try:
                pipe.send_bytes(outcome)
                if outcome[:1] == b"+":
                    # A rank that is done keeps its sockets open until all are: closing them under a peer
                    # that still works would make that peer fail.
                    pipe.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
        pipe.send_bytes(dump(("ready", None)))


def _warning(name: str) -> type[Warning]:
    """Return a class of warnings by its name, with the module if it is not built in."""
    module, _, kind = name.rpartition(".")
    category: type[Warning] = getattr(importlib.import_module(module or "builtins"), kind or "Warning")
    return category


@functools.cache
def _store(port: int) -> dist.TCPStore:
    """Connection of this rank to the pool's store, one for all jobs."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _attempt(job: dict[str, Any], rank: int) -> bytes:
    """b"+" and the result, or b"-" and what was raised."""
    try:
        module = _load(*job["module"])
        function = resolve(module, job["qualname"])
        args, kwargs = pickle.loads(job["arguments"])
        if job["size"] > 1 and job["init_group"]:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(job["store"], _store(job["store_port"])),
                rank=rank,
                world_size=job["size"],
                timeout=datetime.timedelta(seconds=job["timeout"] + 30),  # the pool's own limit comes first
            )
        return b"+" + dump(function(*args, **kwargs))
    except BaseException as error:
        when = time.monotonic()
        lines = traceback.TracebackException.from_exception(error)
        lines.stack[:] = [frame for frame in lines.stack if frame.filename != __file__] or lines.stack
        summary = "".join(lines.format_exception_only()).strip()
        return b"-" + dump((when, summary, "".join(lines.format())))


@contextlib.contextmanager
def _clean_room(rank: int, job: dict[str, Any]) -> Iterator[None]:
    """Context that restores after each job the environment, folder, log, torch's switches and process groups."""
    environment, folder, path = dict(os.environ), os.getcwd(), list(sys.path)
    size = job["size"]
    if size > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(job["port"]),
        )
    # Different on every rank, the same in every run: code that leans on the global generator shows.
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    np.random.seed(1 + rank)  # noqa: NPY002 (the global generator is the point)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # An engine is full of circles (hooks that know their owner); until it is collected, its groups' threads live:
        # hundreds of them, after some tests.
        gc.collect()
        _freeze_modules(len(sys.modules))
        # A rank that leaves at once makes the others fail while they still connect. Torch then counts a group that
        # never was, and in the next job this rank would look for the others under another name than they use.
        restart_group_count()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        logging.getLogger("triax").setLevel(logging.NOTSET)  # which the key log_level sets
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        # These two only where needed: to call the first leaves a function mode on every later op, and the
        # second imports the compiler, two seconds of it.
        if torch.get_default_device().type != "cpu":
            torch.set_default_device(None)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)


@functools.cache
def _freeze_modules(count: int) -> None:
    """Leave what a job imported out of later collections: transformers alone takes 50 ms of each."""
    gc.freeze()


def _wake_without_preempting() -> None:
    """Give this rank and the threads that it starts the policy SCHED_BATCH: see ``grid/comm/thread_priority.py``.

    A pool often has more ranks than there are cores. A rank that is woken by a message then waits until the sender
    waits itself: steps of a small GPT on 2 to 8 ranks and 2 cores take 14 to 20 % less CPU.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(PermissionError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _leave_with_parent() -> None:
    """A rank in the middle of a job must not outlive a parent that was killed."""
    parent = parent_process()
    if parent is not None:

        def watch(sentinel: int = parent.sentinel) -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="watches the parent").start()


def loopback() -> str | None:
    """The name of the loopback interface, so that gloo asks no name server for this machine's address."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
