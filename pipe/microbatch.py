"""Microbatch: inputs and labels of one pass through the pipeline on one rank; and its slices along the tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..base.errors import AgreedError
from ..base.nest import map_tensors
from .program.slices import slice_bounds


class Microbatch:
    """One microbatch on this rank.

    Attributes:
        inputs: inputs of the first stage; None on ranks without it.
        labels: labels for the last stage; None on ranks without it.
        kind: equal for microbatches whose inputs have the same structure, shapes and dtypes.
        samples: indices of its samples in the global batch, which key dropout; None if unknown.
        fields: name -> value of each field that layers of this rank take.
        tokens: length of dim 1 of its inputs, on every rank; 0 without such a dim.
    """

    def __init__(
        self,
        inputs: Any,
        labels: Any,
        kind: Hashable,
        samples: range | None = None,
        fields: Mapping[str, Any] | None = None,
        tokens: int = 0,
    ) -> None:
        self.inputs, self.labels, self.kind, self.samples = inputs, labels, kind, samples
        self.fields, self.tokens = fields or {}, tokens


def cut(
    microbatches: Sequence[Microbatch], slices: Sequence[float], tensor: int
) -> tuple[list[Microbatch], list[list[tuple[int, int]]]]:
    """Return the slices of microbatches, along dim 1 of inputs and labels, and the bounds of each microbatch's slices.

    Of inputs ``(x, documents)`` the second stays whole, as layers with attention need it.

    Args:
        microbatches: the microbatches.
        slices: relative lengths of the slices of each.
        tensor: size of the tensor axis; each slice but the last begins at a multiple of it.

    Raises:
        AgreedError: on every rank, if the sequences of a microbatch are too short for the slices.
        ValueError: dim 1 of a tensor does not count the tokens.
    """
    try:
        all_bounds = [slice_bounds(microbatch.tokens, slices, tensor) for microbatch in microbatches]
    except ValueError as error:
        raise AgreedError(str(error)) from None
    pieces = []
    for microbatch, bounds in zip(microbatches, all_bounds, strict=True):
        for number, (start, stop) in enumerate(bounds):
            inputs, labels, kind = microbatch.inputs, microbatch.labels, (microbatch.kind, number)
            if isinstance(inputs, tuple | list):
                inputs = (_narrow(inputs[:1], start, stop, microbatch.tokens, "inputs")[0], *inputs[1:])
            elif inputs is not None:
                inputs = _narrow(inputs, start, stop, microbatch.tokens, "inputs")
            labels = _narrow(labels, start, stop, microbatch.tokens, "labels")
            pieces.append(Microbatch(inputs, labels, kind, microbatch.samples, microbatch.fields, stop - start))
    return pieces, all_bounds


def _narrow(value: Any, start: int, stop: int, tokens: int, what: str) -> Any:
    """Return the tokens of a slice from each tensor of a nest.

    Raises:
        ValueError: dim 1 of a tensor does not count the tokens.
    """

    def narrowed(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != tokens:
            raise ValueError(
                f"the {what} have a tensor of the shape {tuple(tensor.shape)}, but a schedule with slices cuts dim 1, "
                f"which must count the {tokens} tokens of a sequence: use schedule.slices=1"
            )
        return tensor[:, start:stop]

    return map_tensors(narrowed, value)
