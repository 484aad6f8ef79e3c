"""ModuleInference: any module, or the engine that trains one, for evaluation and transformers' own generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.accelerators import is_accelerator, move_module
from ..base.errors import ConfigError
from ..base.evaluating import evaluating
from ..engine.base import Engine
from ..grid import Grid
from ..models.huggingface.parallelize import parallelize
from ..pipe.module import PipelineModule
from ..tensor_parallel.plans import Style
from .engine import InferenceEngine, init_inference
from .int8 import Int8, quantize
from .load_any import Source, load_any


class ModuleInference(nn.Module):
    """A model for inference: callable, with ``generate``. Attributes that it does not have are the model's. Collective.

    Args:
        model: a transformers model, any other module, or a ``PipelineModule``; or the engine that trains one of them,
            whose weights of each moment are used, and gathered in stage 3 of ZeRO.
        grid: grid whose tensor axis shards a plain module; None: every rank has a whole one. Other models have theirs.
        dtype: dtype to which the weights are cast in place; None: they are not cast. Not for a training engine.
        checkpoint: weights that are loaded first, as ``load_any`` takes them. Not for a training engine.
        base: folder of the checkpoint's relative paths.
        int8: options with which linear layers' weights are quantized; None: they are not. Not for a training engine.
        plan: plan of ``parallelize``; None: that of the model's family.
        on_host: leave a plain module in host memory.
        max_length: the longest sequence of a ``PipelineModule``, if the model has as many positions.

    Attributes:
        module: the model, sharded and cast in place.
        grid: its grid.
        engine: ``InferenceEngine``, which generates from a ``PipelineModule``; None for other models.

    Raises:
        ConfigError: arguments that contradict the model.
    """

    module: Any

    def __init__(
        self,
        model: Any,
        grid: Grid | None = None,
        *,
        dtype: torch.dtype | None = None,
        checkpoint: Source | None = None,
        base: str | Path = "",
        int8: Int8 | None = None,
        plan: Mapping[str, Style | str] | None = None,
        on_host: bool = False,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        trainer = model if isinstance(model, Engine) else None
        self._trainer = [trainer]  # in a list: it is no sub-module
        self.module = model if trainer is None else trainer.module
        self.engine: InferenceEngine | None = None
        if not isinstance(self.module, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}: pass a torch.nn.Module or an engine")
        if trainer is not None:
            for name, given in (("dtype", dtype), ("checkpoint", checkpoint), ("int8", int8)):
                if given is not None:
                    raise ConfigError(f"{name} would change the weights that this engine trains: leave it out")
        pipeline = isinstance(self.module, PipelineModule)
        self.grid: Grid = model.grid if pipeline or trainer is not None else grid or Grid()
        if trainer is None:
            if any(tensor.is_meta for tensor in self.module.parameters()) and not pipeline:
                if checkpoint is None:
                    raise ConfigError("the model is on the meta device and has no values: pass checkpoint=")
                _leave_meta(self.module, torch.device("cpu") if on_host else self.grid.device)
            if checkpoint is not None:
                load_any(self.module, checkpoint, self.grid, base)
        if pipeline:
            positions = [size for m in self.module.modules() if (size := getattr(m, "max_position_embeddings", None))]
            most = None if max_length is None else min([max_length, *positions])
            self.engine = init_inference(model, dtype=dtype, max_length=most, int8=int8 or False)
        elif trainer is None:
            self.module.to(dtype=dtype)
            if not on_host:
                move_module(self.module, self.grid.device)
            if self.grid.tensor.size > 1:
                parallelize(self.module, self.grid, plan)
            if int8 is not None:
                quantize(self.module, self.grid, int8)
        if trainer is None:
            self.module.eval()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a run of the model: an engine's weights are whole, and its module is in evaluation mode."""
        trainer = self._trainer[0]
        if trainer is None:
            yield
            return
        with evaluating(trainer.module), trainer.whole_weights():
            yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: the loss or the outputs that it returns."""
        with self.running():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate: transformers' ``generate`` of the model, or ``InferenceEngine.generate``.

        Draws are equal on the ranks of the tensor axis.

        Raises:
            AttributeError: the model cannot generate.
        """
        if self.engine is not None:
            return self.engine.generate(*args, **kwargs)
        if not hasattr(self.module, "generate"):
            raise AttributeError(f"a {type(self.module).__name__} has no method generate: call the engine instead")
        with self.running(), self._equal_draws():
            return self.module.generate(*args, **kwargs)

    @contextmanager
    def _equal_draws(self) -> Iterator[None]:
        """Draw on every rank of the tensor axis what its first rank draws."""
        axis = self.grid.tensor
        if axis.size == 1:
            yield
            return
        seed = torch.randint(2**62, (1,), device=self.grid.device)
        axis.broadcast(seed)
        device = self.grid.device
        devices = [device] if is_accelerator(device) else []
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(int(seed))
            yield

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


@torch.no_grad()
def _leave_meta(module: Any, device: torch.device) -> None:
    """Allocate a module's tensors, and fill the buffers that no checkpoint has, such as those of rotary positions.

    Raises:
        ConfigError: such a buffer has no values: only transformers' models can make theirs again.
    """
    hidden = [
        (path, owner, name, value)
        for path, owner in module.named_modules()
        for name, value in owner._buffers.items()
        if name in owner._non_persistent_buffers_set and value is not None
    ]
    module.to_empty(device=device)
    empty = [
        (f"{path}.{name}", owner, name, owner._buffers[name]) for path, owner, name, value in hidden if value.is_meta
    ]
    for _, owner, name, value in hidden:
        if not value.is_meta:
            owner._buffers[name] = value.to(device)
    if hasattr(module, "initialize_weights"):  # a transformers model: as in from_pretrained
        for part in module.modules():
            part._is_hf_initialized = not part._non_persistent_buffers_set
        module.initialize_weights()
        module.tie_weights()  # to_empty has made two weights of each tied one
    for path, owner, name, value in empty:
        if owner._buffers[name] is value and value._version == 0:
            raise ConfigError(
                f"{path.lstrip('.')} is a buffer without values, and no checkpoint has it (persistent=False): build "
                "the model outside of the meta device"
            )
