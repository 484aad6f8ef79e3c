"""Engines that replicas which come and go can train: what is refused when the engine is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.option_error import refusal
from ...base.torch_private import AnyBatchNorm
from ...zero.held_bytes import offloaded_bytes
from ...zero.optimizer_kinds import is_known
from ...zero.range_stepper import RangeStepper

if TYPE_CHECKING:
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
