"""DeepSpeed's module ``deepspeed.accelerator``: the device of this process, a GPU or the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...grid.devices import CPUFunctions
from ...grid.environment import host_memory
from .context import CONTEXT
from .ledger import TABLES
from .modules import rest_of

# DeepSpeed's names of torch's functions of a device -> torch's.
_OF_TORCH = {name.partition("=")[0]: name.rpartition("=")[2] for name in TABLES["accelerator"]["names"].split()}
_TENSORS = {f"{name}Tensor" for name in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long")}
# Methods that return the same on every device.
_CONSTANTS: dict[str, Any] = {
    "random": torch.random,
    "is_fp16_supported": True,  # torch computes in float16 on the CPU too
    "is_fp64_supported": True,
    "is_triton_supported": False,  # triax has no kernels of its own, and compiles none
    "get_op_builder": None,
    "create_op_builder": None,
    "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
}


class DeepSpeedAccelerator:
    """Device of this process, with DeepSpeed's methods. On a GPU they are torch's functions of the same names.

    On the CPU the memory is this process's resident memory, and streams and events are None.

    Args:
        kind: ``cuda`` or ``cpu``.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._torch: Any = torch.get_device_module(kind)
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        if name in _CONSTANTS:
            return lambda *args: _CONSTANTS[name]
        if name in _OF_TORCH:
            return getattr(CPUFunctions() if self._name == "cpu" else self._torch, _OF_TORCH[name])
        if name in _TENSORS:
            return getattr(torch if self._name == "cpu" else self._torch, name)
        raise AttributeError(f"the accelerator has no {name!r}: call torch's functions of {self._name} themselves")

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``cpu``, ``cuda``, or with an index ``cuda:0``."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return the name of this process's device: ``cpu``, or ``cuda:0``."""
        return self.device_name(self._torch.current_device())

    def set_device(self, device_index: int) -> None:
        """Make a GPU this process's device; no effect on the CPU."""
        if self._name != "cpu":
            self._torch.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished its work."""
        if self._name != "cpu":
            self._torch.synchronize(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory."""
        if self._name == "cpu":
            return host_memory()
        return int(self._torch.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory that are free."""
        if self._name == "cpu":
            return host_memory(free=True)
        return int(self._torch.mem_get_info(device_index)[0])

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for this device."""
        return "gloo" if self._name == "cpu" else "nccl"

    def is_synchronized_device(self) -> bool:
        """Return True if calls return when the device has finished."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator of random numbers."""
        generators = (torch.default_generator,) if self._name == "cpu" else self._torch.default_generators
        return generators[0 if self._name == "cpu" else device_index]

    def is_bf16_supported(self) -> bool:
        """Return True if the device computes in bfloat16."""
        return self._name == "cpu" or bool(self._torch.is_bf16_supported())

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of weights."""
        return [torch.float, torch.half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a range of NVTX on a GPU."""
        if self._name != "cpu":
            self._torch.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """End the range of NVTX on a GPU."""
        if self._name != "cpu":
            self._torch.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        """Call the function now."""
        return callback()

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return the tensor in pinned memory; the tensor itself without a GPU."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True if the tensor is in pinned memory."""
        return self._name != "cpu" and tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return True if the tensor is on this kind of device."""
        return tensor.device.type == self._name

    def get_compile_backend(self) -> str:
        """Return the backend of ``torch.compile``."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the backend of ``torch.compile`` that ``get_compile_backend`` returns."""
        self._compile_backend = backend


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process: a GPU's if there is one, else the CPU's."""
    if CONTEXT.accelerator is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        CONTEXT.accelerator = DeepSpeedAccelerator("cpu" if accelerator is None else accelerator.type)
    made: DeepSpeedAccelerator = CONTEXT.accelerator
    return made


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Set the object that ``get_accelerator`` returns. triax itself runs on the device of its grid."""
    CONTEXT.accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return True: CPU and GPU both work."""
    return True


__getattr__, __path__ = rest_of(__name__)
