"""An accelerator of this process, ``sim``: torch's PrivateUse1 backend, on memory in which the CPU computes.

What a CPU forgives and an accelerator does not is an error or on record here:

- an op over tensors of two devices raises an error;
- where the host waits for the device (``item``, ``nonzero``, a blocking copy), ``DEVICE.waits`` records the line;
- a non-blocking copy to the host shows NaN until the host has waited; one from pinned memory must find that memory
  unchanged when the host has waited;
- new memory is NaN or the largest integer, and memory that is given back too;
- streams: what another stream uses before it has waited, and memory that is released while a stream may use it, are
  faults on record (simulated_order.py);
- ``sim.memory_allocated()`` counts every storage.

Importing this module registers the backend, for the rest of the process. ``simulated_nccl.py`` has its collectives.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _device, backend_registration
from torch.utils._pytree import tree_leaves

from triax.base.uncompiled import uncompiled

from support.simulated_order import Clock, Order, Uses

NAME = "sim"
_ATEN = torch.ops.aten
_CPU = torch.device("cpu")
_empty = torch.empty  # which ``_register`` replaces
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Ops whose result's shape or value the host needs before it can go on.
_WAITS = {
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.equal.default,
    _ATEN._unique2.default,
    _ATEN.unique_dim.default,
    _ATEN.unique_consecutive.default,
    _ATEN.bincount.default,
    _ATEN.repeat_interleave.Tensor,
}
_LIBRARY = str(__import__("triax").__path__[0])


class Copy(NamedTuple):
    """A non-blocking copy of a stream, its operation of this number.

    ``finish`` is called when the host has waited for it. A copy to the host then writes ``target``; a copy from pinned
    memory has none, and checks that this memory has not changed.
    """

    stream: int
    number: int
    finish: Callable[[], None]
    target: Tensor | None


class SimulatedDevice:
    """State of the device of this process.

    Attributes:
        waits: the places at which the host waited for the device, as "op at file:line".
        faults: what would be wrong on an accelerator, found when the host waited.
        allocated, peak: bytes of all storages, now and at most.
        is_there: False: torch finds no such device; see ``simulated``.
        order: what its streams and the host have waited for.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.faults: list[str] = []
        self.allocated = self.peak = 0
        self.is_there = False
        self.order = Order()
        self._copies: list[Copy] = []

    def wait(self, what: str = "", until: Clock | None = None) -> None:
        """Let the host wait for the current stream, or until a clock, and end the copies that are then done.

        ``what`` names the op that makes the host wait, for the record.
        """
        if what:
            self.waits.append(f"{what} at {place()}")
        order = self.order
        order.host |= order.clocks[order.current] if until is None else until
        copies, self._copies = self._copies, []
        for copy in copies:
            if copy.number <= order.host[copy.stream]:
                copy.finish()
            else:
                self._copies.append(copy)

    def later(self, finish: Callable[[], None], target: Tensor | None = None) -> None:
        """Call a function, which may write a ``target`` of the host, when the host has waited for the current stream.

        If it writes one, the current stream has read by now what its earlier copies read.
        """
        stream = self.order.current
        if target is not None:
            with self.in_order():
                checks = [copy for copy in self._copies if copy.stream == stream and copy.target is None]
                for copy in checks:
                    copy.finish()
                    self._copies.remove(copy)
            poison(target)
        self._copies.append(Copy(stream, self.order.clocks[stream][stream], finish, target))

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Context in which memory of the host has what the current stream has copied to it, as this stream sees it."""
        targets: list[Tensor] = []
        for copy in self._copies:
            if copy.stream == self.order.current and copy.target is not None:
                copy.finish()
                targets.append(copy.target)
        yield
        for target in targets:
            poison(target)

    def access(self, tensor: Tensor, write: bool) -> None:
        """Let the current stream read or write a tensor of the device."""
        if count := tensor.numel():
            if not tensor.is_contiguous():
                pairs = zip(tensor.size(), tensor.stride(), strict=True)
                count = int(1 + sum((size - 1) * stride for size, stride in pairs))
            storage: Any = tensor.untyped_storage()
            start = int(tensor.storage_offset()) * (width := tensor.element_size())
            self._note(self.order.access(storage._uses, start, start + count * width, write, place()))

    def release(self, size: int, uses: Uses) -> None:
        """Take memory back."""
        self.count(-size)
        self._note(self.order.release(uses, place()))

    def _note(self, fault: str) -> None:
        if fault:
            self.faults.append(fault)

    def count(self, size: int) -> None:
        """Count bytes that are taken, or given back."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


DEVICE = SimulatedDevice()


@contextmanager
def simulated() -> Iterator[SimulatedDevice]:
    """Context in which ranks train on the simulated device unless told otherwise. Its records begin empty.

    A job of the pool needs ``init_group=False``, so that ``Grid`` makes the process group with NCCL's rules, and
    ``new_processes=True``: autograd counts the devices at the first backward pass of a process, and the backend stays
    in a process.
    """
    importlib.import_module("support.simulated_nccl")
    DEVICE.waits, DEVICE.faults, DEVICE.is_there = [], [], True
    try:
        yield DEVICE
    finally:
        DEVICE.wait(until=DEVICE.order.everything())
        DEVICE.order.current = 0
        DEVICE.is_there = False


# Code that stands between the line that asks for a collective and torch.
_BETWEEN = ("/tests/support/simulated_", "/grid/comm/", "/base/uncompiled.py", "/site-packages/")


def place() -> str:
    """Return the line of triax, or of a test, that runs now; "the backward pass" in a thread of autograd's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if name := _shown(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"


@functools.cache
def _shown(file: str) -> str:
    """Return a file's path in the repository, or "" if its lines are not shown."""
    inside = file.startswith(_LIBRARY) and not any(part in file for part in _BETWEEN)
    return file.removeprefix(_LIBRARY).lstrip("/") if inside else ""


# ------------------------------------------------------------------------------------------------------------ memory


def _words() -> tuple[int, int]:
    """Return which words of torch's StorageImpl are its pointer and its size."""
    memory = torch.UntypedStorage(12_345)
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), 12_345)
    words = list((ctypes.c_uint64 * 12).from_address(storage._cdata))
    return words.index(memory.data_ptr()), words.index(12_345)


def _storage(memory: torch.UntypedStorage) -> Any:
    """Return a storage of the device over a storage of the CPU, which it owns."""
    device = torch.device(NAME, 0)
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), device, memory.nbytes())
    _own(storage, memory)
    return storage


def _own(storage: Any, memory: torch.UntypedStorage) -> None:
    storage._memory, storage._uses = memory, Uses(DEVICE.order.current)
    DEVICE.count(memory.nbytes())
    owner: Any = memory
    owner._release = Release(memory.nbytes(), storage._uses)


class Release:
    """What is released with the memory that holds it. (``weakref.finalize`` takes five times as long.)"""

    __slots__ = ("size", "uses")

    def __init__(self, size: int, uses: Uses) -> None:
        self.size, self.uses = size, uses

    def __del__(self) -> None:
        DEVICE.release(self.size, self.uses)


def _resize(storage: Any, size: int) -> None:
    """Give a storage other memory, with the old values at its start, as an accelerator's allocator does."""
    old, new = storage._memory, torch.UntypedStorage(size)
    poison(torch.empty(0, dtype=torch.uint8).set_(new))
    kept = min(size, old.nbytes())
    new[:kept].copy_(old[:kept]) if kept else None
    poison(torch.empty(0, dtype=torch.uint8).set_(old))
    _own(storage, new)
    words = (ctypes.c_uint64 * 12).from_address(storage._cdata)
    words[POINTER], words[SIZE] = new.data_ptr(), size


def poison(tensor: Tensor) -> None:
    """Fill a tensor of the CPU with what no program counts on: bytes of which every float is NaN."""
    if tensor.numel():
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.element_size()
        if tensor.is_contiguous():
            whole[start : start + tensor.nbytes].fill_(0xFF)
        else:
            tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 1)


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU over the memory of one of the device."""
    storage: Any = tensor.untyped_storage()
    alias: Tensor = _empty(0, dtype=tensor.dtype)
    return alias.set_(storage._memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_device(tensor: Tensor, storage: Any = None) -> Tensor:
    """Return a tensor of the device over the memory of one of the CPU."""
    made: Tensor = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    _describe(made, tensor, _storage(tensor.untyped_storage()) if storage is None else storage)
    return made


def _describe(tensor: Tensor, like: Tensor, storage: Any) -> None:
    """Give a tensor of the device a storage, and the shape of another tensor."""
    offset, size, stride = like.storage_offset(), like.size(), like.stride()
    _ATEN.set_.source_Storage_storage_offset.redispatch(_ON_CPU, tensor, storage, offset, size, stride)


# --------------------------------------------------------------------------------------------------------------- ops


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op on the memory of its arguments: every op of the device comes here."""
    with torch._C.DisableTorchFunctionSubclass():  # as kernels in C++ do
        return _run_on_memory(op, args, kwargs)


def _run_on_memory(op: Any, args: Any, kwargs: Any) -> Any:
    ours: dict[int, Tensor] = {}  # id of a tensor of the CPU -> the tensor of the device whose memory it is
    storages: dict[int, Any] = {}
    facts = _facts(op)
    counts, writing = facts.counts, False

    def forth(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == NAME:
                if counts:
                    DEVICE.access(value, writing)
                alias, storage = on_cpu(value), value.untyped_storage()
                ours[id(alias)], storages[storage._memory._cdata] = value, storage  # type: ignore[attr-defined]
                return alias
            if value.dim():
                raise RuntimeError(f"{op}: tensors of two devices, {_shapes((args, kwargs))}, at {place()}")
        elif isinstance(value, torch.device):
            return _CPU
        elif isinstance(value, torch.storage.UntypedStorage):
            memory = value._memory  # type: ignore[attr-defined]
            storages[memory._cdata] = value
            return memory
        return value

    arguments, named = [], {}
    for name, value in zip(facts.names, args, strict=False):
        writing = name in facts.writes
        arguments.append(value if type(value) in _PLAIN else _each(forth, value))
    for name, value in kwargs.items():
        writing = name in facts.writes
        named[name] = value if type(value) in _PLAIN else _each(forth, value)
    if _waits(op, args, kwargs):
        DEVICE.wait(str(op))
    if facts.is_bitwise:  # which take no number for a tensor, as other operators do
        arguments = [torch.tensor(x, dtype=arguments[0].dtype) if type(x) in (int, bool) else x for x in arguments]

    def back(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        memory = result.untyped_storage()
        storage = storages.get(memory._cdata)
        if (given := ours.get(id(result))) is None:
            if facts.is_empty:
                poison(result)
            made = _on_device(result, storage)
            if counts:
                DEVICE.access(made, True)
            return made
        if storage is None:
            raise RuntimeError(f"{op} gave a tensor other memory, which the simulated device cannot follow")
        if storage.nbytes() != memory.nbytes() or storage.data_ptr() != memory.data_ptr():
            _follow(storage)
        if (given.size(), given.stride()) != (result.size(), result.stride()):
            _describe(given, result, storage)
        return given

    return _each(back, op(*arguments, **named))


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``function`` of a value, or of each value of a list or tuple, which are the only nests of torch's ops."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [function(each) for each in value] if isinstance(value, list) else tuple(map(function, value))
    return function(value)


_PLAIN = {NoneType, bool, int, float, torch.dtype}  # types of arguments that hold no tensor and no device


class Facts(NamedTuple):
    """What the simulation must know of an op.

    Attributes:
        names: names of its arguments, in their order.
        counts: True if it reads or writes memory.
        writes: names of the arguments whose memory it writes.
        is_empty: True if it makes memory.
        is_bitwise: True if it is one of the operators on bits.
    """

    names: tuple[str, ...]
    counts: bool
    writes: frozenset[str]
    is_empty: bool
    is_bitwise: bool


@functools.cache
def _facts(op: Any) -> Facts:
    arguments, is_empty = op._schema.arguments, op in _EMPTY
    written = (each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)
    return Facts(
        tuple(each.name for each in arguments),
        not (op.is_view or is_empty or torch.Tag.inplace_view in op.tags),
        frozenset(written),
        is_empty,
        op._schema.name.startswith("aten::bitwise_"),
    )


def _waits(op: Any, args: Any, kwargs: Any) -> bool:
    """Return True if the host must know values before it goes on."""
    if op is _ATEN.index.Tensor:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return op in _WAITS and kwargs.get("output_size") is None


_EMPTY = {_ATEN.empty.memory_format, _ATEN.empty_strided.default}


def _follow(storage: Any) -> None:
    """After the CPU's memory was enlarged in place: write its new place and size into the device's storage."""
    memory = storage._memory
    DEVICE.count(memory.nbytes() - storage.nbytes())
    words = (ctypes.c_uint64 * 12).from_address(storage._cdata)
    words[POINTER], words[SIZE] = memory.data_ptr(), memory.nbytes()


def _shapes(arguments: Any) -> str:
    tensors = [value for value in tree_leaves(arguments) if isinstance(value, Tensor)]
    return ", ".join(f"{tuple(tensor.shape)} on {tensor.device.type}" for tensor in tensors)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between the device and the host, or on the device."""
    with torch._C.DisableTorchFunctionSubclass():
        return _copied(source, target, non_blocking)


def _copied(source: Tensor, target: Tensor, non_blocking: bool) -> Tensor:
    of, to = source.device.type, target.device.type
    for tensor, write in ((source, False), (target, True)):
        if tensor.device.type == NAME:
            DEVICE.access(tensor, write)
    if of == to:
        on_cpu(target).copy_(on_cpu(source))
    elif to == NAME:
        with DEVICE.in_order():
            on_cpu(target).copy_(source)
            before = source.detach().clone()
        if not non_blocking:
            DEVICE.wait("a blocking copy to the device")
        elif _is_pinned(source):
            where = place()

            def check() -> None:
                if not _equal(before, source):
                    DEVICE.faults.append(f"pinned memory was changed while it was copied to the device at {where}")

            DEVICE.later(check)
    elif non_blocking:
        value = on_cpu(source).to(target.dtype, copy=True)
        DEVICE.later(lambda: (target.copy_(value), None)[1], target)
    else:
        DEVICE.wait("a blocking copy to the host")
        target.copy_(on_cpu(source))
    return target


def _to(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """Run ``tensor.to``: torch's own takes pinned memory for a non-blocking copy to the host."""
    form = torch.preserve_format if memory_format is None else memory_format
    if tensor.device.type != NAME:
        there = _on_device(torch.empty_like(tensor, dtype=dtype, memory_format=form))
        return _copy(tensor, there, non_blocking)
    if device is None or device.type == NAME:
        return _copy(tensor, _on_device(torch.empty_like(on_cpu(tensor), dtype=dtype, memory_format=form)))
    host = torch.empty_like(on_cpu(tensor), dtype=dtype, memory_format=form)
    return _copy(tensor, host, non_blocking)


def _equal(tensor: Tensor, other: Tensor) -> bool:
    return torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _item(tensor: Tensor) -> Any:
    DEVICE.access(tensor, False)
    DEVICE.wait("item")
    return on_cpu(tensor).item()


# ------------------------------------------------------------------------------------------------- the module torch.sim


class Stream(torch.Stream):
    """A queue of operations of the device. Streams of other devices are torch's own."""

    _numbers = itertools.count(1)

    def __new__(cls, device: Any = None, *, number: int | None = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type != NAME:
            return torch._C.Stream(device, **options)
        number = next(cls._numbers) if number is None else number
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return super().__new__(cls, stream_id=number, device_index=0, device_type=kind)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._outer: list[int] = []

    def __enter__(self) -> Stream:
        self._outer.append(DEVICE.order.current)
        DEVICE.order.current = self.stream_id
        return self

    def __exit__(self, *_: Any) -> None:
        DEVICE.order.current = self._outer.pop()

    def record_event(self, event: Any = None) -> Any:
        made = Event() if event is None else event
        made.record(self)
        return made

    def wait_event(self, event: Any) -> None:
        DEVICE.order.clocks[self.stream_id] |= event.clock

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        DEVICE.wait("Stream.synchronize", DEVICE.order.clocks[self.stream_id])

    def query(self) -> bool:
        DEVICE.wait(until=DEVICE.order.clocks[self.stream_id])
        return True


class Event:
    """A point in a stream, which has reached it at once. Events of other devices are torch's own."""

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is not None and torch.device(device).type != NAME:
            return _TorchEvent(device, **options)
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time, self.clock = 0.0, Clock()

    def record(self, stream: Any = None) -> None:
        number = DEVICE.order.current if stream is None else stream.stream_id
        self._time, self.clock = time.perf_counter(), DEVICE.order.clocks[number].copy()

    def wait(self, stream: Any = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._time - self._time)

    def synchronize(self) -> None:
        DEVICE.wait("Event.synchronize", self.clock)

    def query(self) -> bool:
        DEVICE.wait(until=self.clock)
        return True


_TorchEvent = torch.Event


def current_stream(device: Any = None) -> Stream:
    """Return the current stream. It is one of the process: torch's is one of the thread."""
    return Stream(number=DEVICE.order.current)


def set_stream(stream: Any) -> None:
    """Make a stream the current one."""
    DEVICE.order.current = stream.stream_id


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams."""
    DEVICE.wait("synchronize", DEVICE.order.everything())


def _record_stream(tensor: Tensor, stream: Any) -> None:
    storage: Any = tensor.untyped_storage()
    storage._uses.recorded.add(stream.stream_id)


class _Properties:
    name, total_memory, multi_processor_count, uuid = "a simulated device", 2**34, 1, str(uuid.uuid4())


class _Functions:
    """Functions that torch's module of a device has."""

    Stream, Event = Stream, Event
    current_stream, set_stream = staticmethod(current_stream), staticmethod(set_stream)
    synchronize = staticmethod(synchronize)

    def default_stream(self, device: Any = None) -> torch.Stream:
        made: torch.Stream = Stream(number=0)
        return made

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    @property
    def default_generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: Any = None) -> int:
        return DEVICE.allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return DEVICE.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        DEVICE.peak = DEVICE.allocated

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_device_properties(self, device: Any = None) -> _Properties:
        return _Properties()

    def get_device_name(self, device: Any = None) -> str:
        return _Properties.name

    def is_available(self) -> bool:
        return DEVICE.is_there

    def is_initialized(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def device_count(self) -> int:
        return int(DEVICE.is_there)

    def current_device(self) -> int:
        return 0

    def init(self) -> None: ...

    def set_device(self, device: Any) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def empty_cache(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return DEVICE.is_there


# -------------------------------------------------------------------------------------------------------- registration

_pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


def _pin(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = storage
    return tensor


def _register() -> tuple[torch.library.Library, ...]:
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Functions(), _Hook())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(uncompiled(_run), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # of ops that autocast does not cast
    aten.impl("_copy_from", uncompiled(_copy), "PrivateUse1")
    aten.impl("_to_copy", uncompiled(_to), "PrivateUse1")
    aten.impl("_local_scalar_dense", uncompiled(_item), "PrivateUse1")
    aten.impl("record_stream", uncompiled(_record_stream), "PrivateUse1")
    # Before they are replaced, torch must list the functions that `with torch.device(...)` redirects.
    _device._device_constructors()
    # torch asks a C++ allocator for pinned memory, which a backend in Python cannot give.
    resize, resizable = torch.UntypedStorage.resize_, torch.UntypedStorage.resizable

    def pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            return _pin(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

        return made

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != NAME:
            return resize(storage, size)
        _resize(storage, size)
        return storage

    patched: Any = torch
    # The streams of torch's guard for backends in Python are all the default stream.
    patched.Stream, patched.Event = Stream, Event
    for function in (current_stream, set_stream, synchronize):
        setattr(torch.accelerator, function.__name__, function)
    for name in ("empty", "zeros", "empty_like"):
        setattr(patched, name, pinning(getattr(torch, name)))
    patched.Tensor.pin_memory = lambda tensor, device=None: _pin(tensor.clone())
    patched.UntypedStorage.resize_ = resized
    patched.UntypedStorage.resizable = lambda storage: storage.device.type == NAME or resizable(storage)
    return every, aten


_KEPT = _register()
POINTER, SIZE = _words()
