"""torch's private names that triax uses: each stands here once, with the reason, and what to do when torch drops it.

tests/base/test_torch_private.py shows that each does what triax relies on, and keeps private names of torch out of all
other files. After an update of torch, run this test first. Three things are left where they are: ``agent.py`` and
``elastic.py`` of grid/launcher override what is protected in torchrun's agent and rendezvous, a dry run replaces
functions of torch by their names (``plugins/dry_run/rank.py``), and ``PipelineModule`` has the attribute that
``DistributedDataParallel`` reads first (tests/pipe/test_other_wrappers.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode as function_mode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode_temporarily as without_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# Function modes: ``SplitBackward`` is left out for a while, and a recomputation runs under the modes of its forward.
# There is no public way to ask which modes are on. If they go: let ``SplitBackward`` count its own ``with``.
# ``TorchDispatchMode`` is documented, though its module is private. If it moves: import it from there.
# ``without_dispatch_modes``: an op runs beside the modes that watch it. If it goes: flags in the modes themselves.
# ``tree_*`` walk the values of torch's own operators, as torch does. If they go: ``torch.utils.pytree``, or ``optree``.
__all__ = [
    "TorchDispatchMode",
    "function_mode",
    "function_modes",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_dispatch_modes",
    "without_function_mode",
]

# ---------------------------------------------------------------------------------------------------------- autograd

# Number of the backward pass that runs in this thread; -1 if none runs. A layer that runs in a backward pass is
# recomputed. Public hooks see nodes, not passes. If it goes: a hook on each loss that marks the pass, which misses
# passes that user code starts.
backward_task = torch._C._current_graph_task_id
# Call a function when the backward pass that runs now has ended: DDP and FSDP use it too. If it goes: a hook on the
# last node of the graph.
call_after_backward = torch.autograd.Variable._execution_engine.queue_callback
# Number of nodes that this thread has recorded: shows whether a user's hook has recorded one. If it goes: compare the
# ``grad_fn`` of the hook's inputs and outputs.
recorded_nodes = torch.autograd._get_sequence_nr
# True within ``torch.func.grad``, ``vmap``, ...: they take no autograd function of triax's, and run no hooks. If it
# goes: catch torch's error, as ``base/autograd.py`` does for saved tensors.
in_transform = torch._C._are_functorch_transforms_active


def has_hooks(tensor: Tensor) -> bool:
    """Return True if user code sees or changes a tensor's gradient in the backward pass (``Tensor.register_hook``).

    torch has no public list of hooks. If it goes: let parameters of triax record ``register_hook``.
    """
    return bool(tensor._backward_hooks)


def sum_hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks that run after autograd has added to ``.grad``. The reason is that of ``has_hooks``."""
    return [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]


def module_hooks(module: nn.Module, *kinds: str) -> bool:
    """Return True if a module has hooks of one of the kinds forward, forward_pre, backward or backward_pre.

    torch has no public list of hooks. If it goes: count the calls of ``register_*_hook`` in ``unit_forward.py``.
    """
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


# ------------------------------------------------------------------------------------------------- tensors and memory


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that two storages have in common if they are one.

    ``data_ptr`` is 0 for all storages of the meta device, and for empty ones. If it goes: ``data_ptr``, and on the meta
    device the id of a storage that is kept.
    """
    number: int = storage._cdata
    return number


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and Python variables that hold a storage, ``storage`` among them.

    A gradient in memory of its own may become its bucket's without a copy; one that others hold may not. If it goes:
    always copy.
    """
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is a view of; None if it is none.

    An autograd function must not return a view that is changed in place later. If it goes: always copy.
    """
    return view._base


# Contexts without ``__torch_function__`` of subclasses, and without function modes either: their own code handles their
# tensors as plain ones. torch documents both, under this private module. If they move: import them from there.
without_subclasses = torch._C.DisableTorchFunctionSubclass
without_functions = torch._C.DisableTorchFunction
# ``__torch_function__`` of a subclass that leaves functions alone, and sees operators only. torch's documentation of
# subclasses has it. If it goes: a method that calls the function within ``without_subclasses``.
no_function = torch._C._disabled_torch_function_impl
# Make a tensor of a subclass without memory, as DTensor does. If it goes: ``torch.empty`` on the meta device.
make_wrapper = Tensor._make_wrapper_subclass
# Number of dispatch modes that are on: a compiled graph would hide its operators from them. If it goes: let triax's own
# modes count their ``with``.
dispatch_modes = torch._C._len_torch_dispatch_stack
# Type of the devices that another package brings (NPU). If it goes: the first ``torch.device`` type that torch lacks.
extension_device = torch._C._get_privateuse1_backend_name

# ------------------------------------------------------------------------------------------------------- arithmetic

# One kernel for a list of tensors, as torch's optimizers and ``clip_grad_norm_`` use. If they go: a loop.
multiply_all = torch._foreach_mul_
norms_of_all = torch._foreach_norm
# Check of a value on a device, without waiting for it. If it goes: no check there, or one that waits.
assert_later = torch._assert_async
# Flash attention with the log-sum-exp that a ring needs, and its backward pass: the public function returns the output
# alone. If they go: the plain computation of context/block.py, in chunks.
flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_gpu = torch.ops.aten._scaled_dot_product_flash_attention
flash_gpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
# Another shape of a tensor that autograd does not count as a view. If it goes: a copy.
reshaped = torch.ops.aten._unsafe_view
# The operator of ``Tensor.to``, which a subclass sees. If it is renamed: the new name.
cast_operator = torch.ops.aten._to_copy.default

# ------------------------------------------------------------------------------------------- classes and compilation

# Base classes of all dropouts, and of all batch norms. If they go: the list of public classes.
AnyDropout = nn.modules.dropout._DropoutNd
AnyBatchNorm = nn.modules.batchnorm._BatchNorm


def note_uncompiled(function: Any, reason: str) -> None:
    """Let torch.compile end its graph before a function, and say the reason where it may not.

    ``torch.compiler.disable`` sets these attributes, but loads the compiler. If they go: no reason in torch's error.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def compiler_backend(name: str) -> Any:
    """Return the function of a backend of ``torch.compile``: from a graph and its inputs to the function that runs it.

    ``torch.compile`` takes the options of inductor only with inductor itself as the backend, and triax counts graphs by
    a backend of its own. If it goes: pass ``name`` to ``torch.compile``, and count no graphs.
    """
    import torch._dynamo  # takes seconds

    return torch._dynamo.lookup_backend(name)


def inductor_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """Return the options of inductor that a mode of ``torch.compile`` stands for. The reason: ``compiler_backend``."""
    import torch._inductor as inductor

    return {} if mode is None else inductor.list_mode_options(mode, dynamic)


def cpp_compilers() -> list[str]:
    """Return the C++ compilers that inductor looks for. If it goes: check for ``g++`` and ``clang++``."""
    import torch._inductor.config

    return [name for name in torch._inductor.config.cpp.cxx if name]


def profiler_of_all_threads() -> Any:
    """Return the setting with which torch.profiler records all threads: the second pass of a pair has its own.

    If it goes: no setting, and the profiler sees the thread that started it, and the backward passes.
    """
    return torch.profiler._ExperimentalConfig(profile_all_threads=True)


# -------------------------------------------------------------------------------------------------- process groups


def default_store() -> dist.Store:
    """Return the store of the process group that a program has made itself. If it goes: ask the program for it."""
    return dist.distributed_c10d._get_default_store()


def group_names() -> dict[dist.ProcessGroup, Any]:
    """Return the names by which torch's functional collectives find groups. If it goes: ``ProcessGroup.group_name``."""
    return dist.distributed_c10d._world.pg_names


def restart_group_count() -> None:
    """Let torch count its groups from 0: their names must be the same on all ranks, also after a failed connection.

    If it goes: give each group of ``testing/`` a name of its own.
    """
    dist.distributed_c10d._world.group_count = 0


def gloo_options(host: str, timeout: timedelta) -> Any:
    """Return the options of a gloo group that listens on an address, which no public argument sets.

    If they go: the environment variable ``GLOO_SOCKET_IFNAME``, which holds for the whole process.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return options
