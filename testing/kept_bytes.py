"""Bytes of a microbatch that each layer keeps for the backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..pipe.module import PipelineModule


def kept_bytes(model: PipelineModule, inputs: Any, fields: dict[str, Any]) -> dict[str, int]:
    """Run a microbatch forward on a model of one stage, and return the bytes of the storages that autograd saves.

    A storage counts for the first layer that saves it; parameters and buffers do not count. What is saved in functions
    between the layers' modules counts for the layer before.
    """
    seen = {_address(each) for each in (*model.parameters(), *model.buffers())}
    held: list[Tensor] = []  # so that no address is used twice
    found: dict[str, int] = {}
    current = ""

    def pack(tensor: Tensor) -> Tensor:
        if (address := _address(tensor)) not in seen:
            seen.add(address)
            held.append(tensor)
            found[current] = found.get(current, 0) + tensor.untyped_storage().nbytes()
        return tensor

    def entered(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            nonlocal current
            current = name
            found.setdefault(name, 0)

        return hook

    layers = [(name, layer) for _, name, layer in model.named_layers() if name != "loss_fn"]
    handles = [layer.register_forward_pre_hook(entered(name)) for name, layer in layers]
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model.run_stage(0, inputs, fields)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
