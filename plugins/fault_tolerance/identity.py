"""Identity of a run, as short values that all replicas must have: one that would compute something else is refused.

Options, grid, model, loss function, optimizer and learning-rate schedule are described by names, plain attributes and
the code of the user's functions, whatever file they are in; data by its length, its facts and samples that are read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...base import VERSION
from ...base.source_hashes import source_hashes
from ...checkpoint.generator_states import unchanged_random_states

if TYPE_CHECKING:
    from ...engine.base import Engine

_SAMPLES = 8  # samples of the data that are compared, evenly spaced
_LIBRARIES = frozenset({"triax", "torch", *sys.stdlib_module_names} - {"__main__"})
_OWN = frozenset(vars(nn.Module()))  # attributes of every module, which are no settings
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)


def identity(engine: Engine) -> dict[str, str]:
    """Return name -> value of what must be equal on all replicas. Collective over the ranks of this replica."""
    module, optimizer = engine.module, engine.data_axis.optimizer
    assert optimizer is not None
    groups = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
    shapes = [(name, str(each.dtype), [*each.shape], each.requires_grad) for name, each in module.named_parameters()]
    mine = {
        "model": _digest([(name, _Described().of(each)) for name, each in module.named_modules()]),
        "loss function": _digest(_Described().of(getattr(module, "loss_fn", None))),
        "parameters": _digest(shapes),
        "optimizer": _digest([_Described().of(type(optimizer)), _Described().of(groups)]),
        "learning-rate schedule": _digest(_Described().of(engine.lr_scheduler)),
        **(_of_data(engine) if engine.grid.rank == 0 else {}),
    }
    everyone = engine.grid.world.all_gather_json(mine)
    found = {
        key: value if key in _READ else _digest([each[key] for each in everyone]) for key, value in everyone[0].items()
    }
    torch_ = f"torch {torch.__version__}, Python {platform.python_version()}, numpy {np.__version__}"
    found["versions"] = f"triax {VERSION} with the files {source_hashes(set())['triax']}, {torch_}"
    return {"options": _digest(_options(engine)), "grid": str(dict(engine.grid.topology.sizes)), **found}


def _options(engine: Engine) -> dict[str, Any]:
    settings = {k: v for k, v in engine.settings(given=True).items() if k not in ("checkpoint", "monitor")}
    section = {
        k: v for k, v in settings.pop("fault_tolerance", {}).items() if k in ("active", "replay", "zero", "copies")
    }
    if section.get("zero"):  # a checkpoint is saved together
        section["every"] = engine.options.checkpoint.every
    return {**settings, "fault_tolerance": section}


_READ = ("data", "samples", "collation")  # of rank 0 alone: it is the same data on all


def _of_data(engine: Engine) -> dict[str, str]:
    """Return the length, the facts and some samples of the data. A sample that is drawn anew is not compared."""
    loader: Any = engine.training_dataloader
    data = loader.dataset
    collate = getattr(loader, "collate_fn", None)
    found = {"collation": _digest(_Described().of(getattr(collate, "__func__", collate)))}
    facts = getattr(data, "facts", None)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return {**found, "data": f"{type(data).__qualname__} {_digest(_Described().of(facts))}"}
    places = sorted({len(data) * place // _SAMPLES for place in range(_SAMPLES)})
    with unchanged_random_states(engine.grid):
        once, again = (_digest([_Described().of(data[place]) for place in places]) for _ in range(2))
    return {
        **found,
        "data": f"{len(data)} samples of {type(data).__qualname__}, {_digest(_Described().of(facts))}",
        "samples": once if once == again else "drawn anew in each reading",
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


class _Described:
    """Description of a value for a digest, equal in all processes in which the value is."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id, kept alive, so that no other value gets it

    def of(self, value: Any) -> Any:
        """Return the description: a nest that JSON can hold."""
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, Tensor | np.ndarray):
            array = value.detach().cpu().contiguous() if isinstance(value, Tensor) else np.ascontiguousarray(value)
            data = array.reshape(-1).view(torch.uint8).numpy() if isinstance(array, Tensor) else array
            return [str(value.dtype), [*value.shape], hashlib.sha256(data.tobytes()).hexdigest()]
        if id(value) in self._seen:
            return "see above"
        self._seen[id(value)] = value
        if isinstance(value, list | tuple):
            return [self.of(each) for each in value]
        if isinstance(value, Mapping):
            return {str(key): self.of(each) for key, each in value.items()}
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        if isinstance(value, functools.partial):
            return [self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            return [_name(value), self._function(value) if _is_users(value) else None]
        if isinstance(value, types.BuiltinFunctionType):
            return _name(value)
        if isinstance(value, type):
            return [_name(value), self._class(value)]
        return [self.of(type(value)), self._attributes(value)]

    def _attributes(self, value: Any) -> Any:
        """Return the attributes that say how an object computes; of others than those here, their class is enough."""
        if is_dataclass(value):
            return {each.name: self.of(getattr(value, each.name, None)) for each in fields(value)}
        computes = callable(value) and not isinstance(value, nn.Module) and self._class(type(value))
        if not (computes or isinstance(value, nn.Module | torch.optim.lr_scheduler.LRScheduler)):
            return None
        skipped = _OWN | {"loss_fn", "optimizer"}
        return {
            key: self.of(each)
            for key, each in sorted(vars(value).items())
            if key not in skipped and not isinstance(each, Tensor | nn.Module)
        }

    def _class(self, kind: type) -> dict[str, Any]:
        """Return the functions of a user's class."""
        methods = {
            f"{each.__qualname__}.{name}": method
            for each in kind.__mro__
            for name, method in vars(each).items()
            if isinstance(method, types.FunctionType) and _is_users(method)
        }
        return {name: self._function(method) for name, method in sorted(methods.items())}

    def _function(self, function: types.FunctionType) -> Any:
        """Return a user's function: its code, what it holds, and the values that its names have in its file."""
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        names = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
        held = {name: each for name, each in names.items() if not isinstance(each, types.ModuleType)}
        return [_code(function.__code__), self.of(cells), self.of(function.__defaults__), self.of(held)]


def _code(code: types.CodeType) -> list[Any]:
    """Return a function's code without its places in the file."""
    return [code.co_code.hex(), [_constant(each) for each in code.co_consts], [*code.co_names], [*code.co_varnames]]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _names(code: types.CodeType) -> list[str]:
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names(each)]
    return sorted({*code.co_names, *inner})


def _is_users(function: types.FunctionType) -> bool:
    """Return True if a function is of no library: those are known by their versions."""
    root = str(function.__module__).partition(".")[0]
    return root not in _LIBRARIES and "site-packages" not in function.__code__.co_filename


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
