"""Models built with sharded parameters, so that no rank ever holds all of them.

    with ShardedInit(axis, device):
        model = Model(config)  # any class; each module's parameters are sharded as soon as its __init__ has ended

A parameter is drawn whole, as without the context and in the same order, so that its values are the same; then each
rank keeps its shard of the first rank's values. Later code in a constructor (``apply(init_weights)``, scaling, tying)
finds the parameter whole: a function of torch that is called with it gathers it, and it is sharded again soon after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..base.nest import visit_tensors
from ..base.torch_private import without_functions
from ..grid import Axis
from .managed import SHARD, is_released, set_released
from .state_dict_guard import guard_state_dict

# Parameters that stay whole after a constructor has used them: it may hold ``p.data``, which it writes next.
_RECENT = 4
# What a function of torch reads of a parameter without its values.
_METADATA = {
    torch.Tensor.__hash__,
    torch.Tensor.requires_grad_,
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex")),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "is_meta")
    ),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # a getset descriptor
}


class ShardedParameter:
    """Shard of a parameter that no data axis manages yet, and the way to gather it.

    Args:
        parameter: the parameter, whole.
        axis: the ranks that share it.
        device: device of the parameter while it is whole.
        store: device of the shard.
        dtype: dtype of the shard; None: the parameter's.

    Attributes:
        shard: this rank's elements, (ceil(numel / axis.size),), padded with zeros.
        uses: number of contexts that need the parameter whole.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        axis: Axis,
        device: torch.device,
        store: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self.parameter, self.axis, self.uses = parameter, axis, 0
        self._device, self._store, self._dtype = device, store, dtype
        setattr(parameter, SHARD, self)
        self.keep()

    @torch.no_grad()
    def keep(self, source: int = 0) -> None:
        """Keep this rank's shard of the values on rank ``source``, and release the parameter. Collective."""
        parameter = self.parameter
        dtype = self._dtype if self._dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
        values = parameter.detach().to(self._device, dtype).contiguous()
        if self.axis.size > 1:
            self.axis.broadcast(values, source=source)
        length = -(-values.numel() // self.axis.size)
        start = min(self.axis.rank * length, values.numel())
        self.shard = torch.zeros(length, dtype=dtype, device=self._store)
        shard = values.view(-1)[start : start + length]
        self.shard[: shard.numel()] = shard
        self.release()

    def release(self) -> None:
        """Let the parameter read as NaN; its values are in the shards."""
        parameter = self.parameter
        self._nan = torch.full((), float("nan"), dtype=self.shard.dtype, device=self._device)
        parameter.data = self._nan.expand(parameter.shape)
        set_released(parameter, True)

    def take_assigned(self) -> None:
        """Shard values that ``p.data = values`` gave the released parameter. Collective if there are such values."""
        if is_released(self.parameter) and self.parameter.data_ptr() != self._nan.data_ptr():
            self.keep()

    def whole(self) -> Tensor:
        """Return the whole values. Collective."""
        shard = self.shard.to(self._device)
        flat = shard.new_empty(shard.numel() * self.axis.size)
        self.axis.all_gather(flat, shard)
        return flat[: self.parameter.numel()].view(self.parameter.shape)

    def show(self) -> None:
        """Make the parameter whole. Collective."""
        self.take_assigned()
        if is_released(self.parameter):
            self.parameter.data = self.whole()
            set_released(self.parameter, False)

    def hand_over(self) -> None:
        """End the parameter's life as a shard of its own: a data axis has its values."""
        delattr(self.parameter, SHARD)


def sharded_parameter(parameter: Tensor) -> ShardedParameter | None:
    """Return the record of a parameter that was built in a ``ShardedInit`` and that no data axis manages yet."""
    record = getattr(parameter, SHARD, None)
    return record if isinstance(record, ShardedParameter) else None


def is_placeholder(tensor: Tensor) -> bool:
    """Return True if a tensor is one NaN in the shape of a released parameter."""
    return (
        tensor.numel() > 1
        and not any(tensor.stride())
        and not tensor.is_meta
        and bool(tensor.as_strided((1,), (1,)).isnan())
    )


def gather_all(parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters that were built in a ``ShardedInit`` whole, for good. Collective."""
    for parameter in parameters:
        if (record := sharded_parameter(parameter)) is not None:
            record.show()
            record.hand_over()


@contextmanager
def shown(records: Iterable[ShardedParameter], modifier_rank: int | None) -> Iterator[None]:
    """Context in which parameters are whole. Collective.

    Args:
        records: the parameters.
        modifier_rank: rank whose values all ranks have afterwards. None: the values stay as they are.

    Raises:
        RuntimeError: on every rank, if one wrote without ``modifier_rank``.
    """
    records = list(records)
    with without_functions():
        for record in records:
            record.show()
            record.uses += 1
    versions = [record.parameter._version for record in records]
    try:
        yield
    finally:
        for record in records:
            record.uses -= 1
    written = sum(r.parameter._version != version for r, version in zip(records, versions, strict=True))
    with without_functions():
        for record in records:
            if modifier_rank is not None:
                record.keep(modifier_rank)
            elif not record.uses:
                record.release()
        if records and modifier_rank is None:
            require_none_written(written, records[0].axis, records[0].parameter.device)


def require_none_written(written: int, axis: Axis, device: torch.device) -> None:
    """Refuse writes of single replicas: the values would be lost, or differ between replicas. Collective.

    Raises:
        RuntimeError: on every rank, if parameters were written on any.
    """
    count = torch.tensor([written], device=device)
    axis.all_reduce(count)
    if count:
        raise RuntimeError(
            f"{int(count)} parameters were written by an in-place modification (over all replicas) within "
            "gathered(...), which gathers them to be read only: pass modifier_rank=0, and all replicas have what rank "
            "0 of the data axis wrote"
        )


class ShardedInit:
    """Context in which modules are built with sharded parameters. Collective: every rank builds the same modules.

    An inner context has no effect. Parameters of integers, and those on the meta device, stay whole.

    Args:
        axis: the ranks over which parameters are sharded.
        device: device of a parameter while it is whole.
        store: device of the shards, e.g. ``cpu`` for a model on a GPU. None: ``device``.
        dtype: dtype of floating-point shards; None: that in which they are drawn.

    Attributes:
        records: the parameters, in the order in which they were built.
        record_class: the class of the records.
    """

    record_class = ShardedParameter

    def __init__(
        self, axis: Axis, device: torch.device, store: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._axis, self._device, self._store, self._dtype = axis, device, store or device, dtype
        self.records: list[ShardedParameter] = []
        self._recent: list[ShardedParameter] = []
        self._undo: list[Callable[[], None]] = []
        self._building: set[int] = set()

    def __enter__(self) -> ShardedInit:
        """Begin to shard what is built."""
        if hasattr(nn.Linear.__init__, SHARD):
            return self
        self._wrap_subclasses(nn.Module)
        initialize_subclass = nn.Module.__init_subclass__

        def new_class(cls: type[nn.Module], **options: Any) -> None:
            initialize_subclass(**options)
            self._wrap(cls)

        nn.Module.__init_subclass__ = classmethod(new_class)  # type: ignore[assignment]
        self._undo.append(lambda: delattr(nn.Module, "__init_subclass__"))
        self._mode = _GatherUsed(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._undo:
            self._mode.__exit__(*error)
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()
            if error[0] is None:
                self._settle(0)

    @torch.no_grad()
    def shard(self, module: nn.Module) -> None:
        """Shard the parameters of a module that is built. Collective."""
        with without_functions():
            for parameter in module.parameters():
                drawn = parameter.dtype.is_floating_point or parameter.dtype.is_complex
                if sharded_parameter(parameter) is None and is_placeholder(parameter):
                    raise RuntimeError(
                        f"a parameter of {tuple(parameter.shape)} was made of one that is sharded already, by "
                        "nn.Parameter(p), and would be NaN: assign p itself, or nn.Parameter(p.data.clone())"
                    )
                if drawn and not parameter.is_meta and sharded_parameter(parameter) is None:
                    self.records.append(
                        self.record_class(parameter, self._axis, self._device, self._store, self._dtype)
                    )

    def use(self, arguments: Any) -> list[ShardedParameter]:
        """Gather the released parameters among the arguments of a function. Collective."""
        records: list[ShardedParameter] = []

        def look(tensor: Tensor) -> None:
            record = sharded_parameter(tensor) if isinstance(tensor, nn.Parameter) else None
            if record is not None and not record.uses:  # else a context holds it, maybe on one rank only
                records.append(record)

        visit_tensors(look, arguments)
        for record in records:
            record.show()
            if record in self._recent:
                self._recent.remove(record)
        self._recent += list(dict.fromkeys(records))
        return records

    def settle(self, using: int) -> None:
        """Shard again all but the parameters used last. Collective."""
        self._settle(max(_RECENT, using))

    def _settle(self, leave: int) -> None:
        while len(self._recent) > leave:
            record = self._recent.pop(0)
            if not record.uses and sharded_parameter(record.parameter) is record:
                record.keep()

    def _wrap_subclasses(self, cls: type[nn.Module]) -> None:
        for subclass in cls.__subclasses__():
            self._wrap(subclass)
            self._wrap_subclasses(subclass)

    def _wrap(self, cls: type[nn.Module]) -> None:
        build = vars(cls).get("__init__")
        if build is None or hasattr(build, SHARD) or cls.__module__.startswith("torch.jit"):
            return

        @functools.wraps(build)
        def build_and_shard(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            outermost = id(module) not in self._building
            self._building.add(id(module))
            try:
                build(module, *args, **kwargs)
            finally:
                if outermost:
                    self._building.discard(id(module))
            if outermost:
                with without_functions():
                    self._settle(_RECENT)
                self.shard(module)
                if not self._building:
                    guard_state_dict(module)

        setattr(build_and_shard, SHARD, True)
        cls.__init__ = build_and_shard  # type: ignore[assignment, method-assign]
        self._undo.append(lambda: setattr(cls, "__init__", build))


class _GatherUsed(TorchFunctionMode):
    """Mode that gathers parameters with which a function of torch is called."""

    def __init__(self, context: ShardedInit) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        with without_functions(), torch.no_grad():
            used = self._context.use((args, kwargs))
        y = func(*args, **kwargs)
        if used:
            with without_functions(), torch.no_grad():
                self._context.settle(len(used))
        return y
