"""State of a gradient exchange, copied and loaded: residuals, and the tensors that are equal on every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..base.nest import map_tensors
from .protocols import Compressing, Exchange


def exchange_state_dict(exchange: Exchange) -> dict[str, Any]:
    """Return a copy of this replica's state of an exchange, for ``torch.save``."""
    copied: dict[str, Any] = map_tensors(Tensor.clone, _state(exchange))
    return copied


def load_exchange_state_dict(exchange: Exchange, saved: Mapping[str, Any] | None) -> None:
    """Load what ``exchange_state_dict`` returned.

    Raises:
        ValueError: the state is of another exchange, or of other buckets.
    """
    state = _state(exchange)
    if saved is None or _shapes(saved) != _shapes(state):
        problem = "has no state of a gradient compressor" if saved is None else "is of other compressed tensors"
        raise ValueError(
            f"the saved state {problem}. Make the optimizer with the compression and the parameters with which the "
            "state was saved"
        )
    for key, flats in state["state"].items():
        for tensor, value in zip(flats, saved["state"][key], strict=True):
            tensor.copy_(value)
    if isinstance(exchange, Compressing):
        exchange.steps = saved["steps"]
        for (*_, tensor), (*_, value) in zip(state["kept"], saved["kept"], strict=True):
            tensor.copy_(value)


def _state(exchange: Exchange) -> dict[str, Any]:
    state: dict[str, Any] = {"state": {key: list(flats) for key, flats in exchange.state().items()}}
    if isinstance(exchange, Compressing):
        state["steps"] = exchange.steps
        state["kept"] = [(kept.key, kept.member.layout.name, kept.value) for kept in exchange.replicated()]
    return state


def _shapes(state: Mapping[str, Any]) -> Any:
    return map_tensors(lambda tensor: tensor.shape, {**state, "steps": None})
