"""DeepSpeed's module ``deepspeed.zero``: ``Init``, ``GatheredParameters``, and the state of a parameter in stage 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...base.json_comments import read_json
from ...grid.comm.axis import Axis
from ...zero.gathered_parameters import gathered
from ...zero.managed import may_be_released
from ...zero.modules.units import register_external_parameter, unregister_external_parameter
from ...zero.sharded_init import ShardedInit, sharded_parameter
from ...zero.state_dict_guard import guard_state_dict
from .accelerator import get_accelerator
from .arguments import init_distributed
from .modules import rest_of
from .parameter_marks import MarkedInit, ZeroParamStatus

__getattr__, __path__ = rest_of(__name__)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]


class Init(AbstractContextManager[None]):
    """Context in which any module is built with sharded parameters, for stage 3: ``ShardedInit``.

    Every rank builds the same model within. It has the values that it would have without the context, under the same
    seed; on ranks with different seeds, those of the first one.

    Args:
        module: a module that is built already: its parameters are sharded at once.
        data_parallel_group: the ranks over which parameters are sharded; None: all.
        mem_efficient_linear: without effect: a linear layer keeps its weight itself for the backward pass.
        remote_device: ``cpu`` keeps the shards in host memory, ``nvme`` too, until ``initialize`` puts them on the
            disk; None: as ``offload_param`` of the configuration, else the device.
        pin_memory: without effect here; ``offload_param.pin_memory`` acts in ``initialize``.
        config_dict_or_path: the configuration, a dict or the path of a JSON file, of which ``offload_param`` is read.
        config: an older name of it.
        enabled: False: do nothing.
        dtype: dtype of the shards; None: that in which parameters are drawn. (Masters then start from values that are
            not rounded.)
        mpu: Megatron's object, whose data-parallel group has the ranks.
        others: DeepSpeed's arguments of quantization and groups, which the configuration sets here: without effect.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        unknown = sorted(set(others) - _WITHOUT_EFFECT)
        if unknown:
            raise TypeError(f"Init has no argument {unknown[0]!r}: leave it out")
        self._init: ShardedInit | None = None
        if not enabled:
            return
        init_distributed()
        group = (
            mpu.get_data_parallel_group() if mpu is not None and data_parallel_group is None else data_parallel_group
        )
        group = group or dist.group.WORLD
        axis = Axis("data", dist.get_process_group_ranks(group), dist.get_rank(), group)
        device = torch.device(get_accelerator().current_device_name())
        target = remote_device or _offload_param(config_dict_or_path or config)
        store = device if target in (None, "none") else torch.device("cpu" if target == "nvme" else target)
        self._init = MarkedInit(axis, device, store, dtype)
        if module is not None:
            self._init.shard(module)
            guard_state_dict(module)

    def __enter__(self) -> None:
        if self._init is not None:
            self._init.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._init is not None:
            self._init.__exit__(*error)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the function: ``Init`` changes no constructor. transformers replaces this name while it builds a model."""
    return fn


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """Return False: parameters have no mark of their own; ask ``z3_leaf_module`` of the module."""
    return False


_WITHOUT_EFFECT = {
    "zero_param_parallel_group",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "sequence_data_parallel_group",
    "param_swapper",
}


def _offload_param(config: Mapping[str, Any] | str | Path | None) -> str | None:
    """Return the device of ``zero_optimization.offload_param`` in a configuration; None without one."""
    values: Any = read_json(config) if isinstance(config, (str, Path)) else config or {}
    device: str | None = ((values.get("zero_optimization") or {}).get("offload_param") or {}).get("device")
    return device


def GatheredParameters(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """Gather parameters within a context, as ``triax.zero.gathered``. Collective over the data axis.

    Args:
        params: parameters; those that ZeRO does not shard (stages 0 to 2) are whole at any time and left out.
        modifier_rank: rank of the data axis whose values all replicas have afterwards.
        fwd_module: a module whose ``forward`` uses the parameters, although they are not its own: before
            ``initialize`` they are registered as ``register_external_parameter`` does; after it, without effect.
        enabled: if False, do nothing.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    sharded = [parameter for parameter in listed if may_be_released(parameter)]
    if fwd_module is not None and enabled:
        for parameter in sharded:
            if sharded_parameter(parameter) is not None:  # before initialize
                register_external_parameter(fwd_module, parameter)
    return gathered(sharded, modifier_rank) if enabled and sharded else nullcontext()
