"""Engines that replicas which come and go can train: what is refused when the engine is made, and after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.errors import AgreedError
from ...base.option_error import refusal
from ...base.torch_private import AnyBatchNorm
from ...grid.auxiliary import AuxiliaryLayer
from ...zero.held_bytes import offloaded_bytes
from ...zero.optimizer_kinds import is_known
from ...zero.range_stepper import RangeStepper

if TYPE_CHECKING:
    from torch import Tensor

    from ...engine.base import Engine


def require_supported(engine: Engine) -> None:
    """Refuse what replicas that come and go do not support.

    Raises:
        OptionError: naming the option or the part of the model.
    """
    if not engine.options.batch.counted:
        raise refusal("<fault_tolerance> needs steps of a fixed size: give <batch.size> and <batch.microbatch>")
    if engine.optimizer is None:
        raise refusal("<fault_tolerance> needs an optimizer, and there is none: set <optimizer>, or leave it out")
    if not hasattr(engine.training_dataloader, "seek"):
        raise refusal(
            "<fault_tolerance> gives each replica its samples by number: pass training_data to the engine, a data set "
            "with a length; train_batch() and engine.replicas.microbatches() take them"
        )
    if engine.data_axis.exchange is not None:
        raise refusal("<fault_tolerance> sums uncompressed gradients: leave <compression> out")
    if engine.data_axis.memory.offload.portions or offloaded_bytes(engine.data_axis):
        raise refusal("<fault_tolerance> does not work with offload of weights or optimizer state: leave it out")
    if type(engine.data_axis.stepper) is not RangeStepper:
        raise refusal(
            f"<fault_tolerance> sends the state of optimizers that work element by element, not of "
            f"{type(engine.data_axis.optimizer).__name__}: use AdamW or SGD"
        )
    tolerance, kind = engine.options.fault_tolerance, type(engine.data_axis.stepper.optimizer)
    if tolerance is not None and tolerance.zero and (getattr(kind, "layerwise", False) or not is_known(kind)):
        raise refusal(
            f"<fault_tolerance.zero> steps parts of a layer, on several replicas and one after the other, and "
            f"{kind.__name__} may need whole layers, or count its steps: use AdamW, or leave it out"
        )
    for name, module in engine.module.named_modules():
        if isinstance(module, AnyBatchNorm) and module.track_running_stats:
            raise refusal(
                f"{name} is a {type(module).__name__}, whose running statistics would differ between replicas, and "
                "<fault_tolerance> does not average them: use LayerNorm or GroupNorm"
            )


class ConstantBuffers:
    """Buffers of a model that no step may change, because their values would differ between replicas.

    The buffers of a mixture of experts are left out: they follow from its loads, which are summed.
    """

    def __init__(self, engine: Engine) -> None:
        layers = (module for module in engine.module.modules() if isinstance(module, AuxiliaryLayer))
        summed = {id(buffer) for layer in layers for buffer in layer.buffers()}
        self._versions: list[tuple[str, Tensor, int]] = [
            (name, buffer, buffer._version)
            for name, buffer in engine.module.named_buffers()
            if id(buffer) not in summed
        ]

    def require_unchanged(self) -> None:
        """Refuse a step that has changed a buffer.

        Raises:
            AgreedError: naming the buffer.
        """
        for name, buffer, version in self._versions:
            if buffer._version != version:
                raise AgreedError(
                    f"the step has changed the buffer {name}, whose values would differ between replicas, and "
                    "fault_tolerance does not average them: use a layer without running statistics, such as LayerNorm"
                )
