"""Costs of each layer of a list: seconds of its passes and bytes, from which pipe/cuts.py searches for a cut.

``triax.measure_layers`` measures them, ``triax plan --layer-costs`` computes them by formulas, and both are a JSON file
that can be written by hand::

    {"layers": [{"forward": 1e-4, "inputs": 0, "weights": 2e-4, "states": 4096, "kept": 64, "output": 512}, ...],
     "latency": 2e-5, "per_byte": 1e-9, "speeds": [1, 0.5]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...base.errors import describe, no_such
from ...base.files import distinct_keys, read_object
from .costs import Costs


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer, for one microbatch on one rank.

    Attributes:
        forward: seconds of the forward pass.
        inputs: seconds of the gradient of the inputs.
        weights: seconds of the gradient of the weights.
        states: bytes of the weights, their gradients and the optimizer's state.
        kept: bytes that are kept for the backward pass.
        output: bytes of the output, which are sent if the next layer is on another rank.
        name: name of the layer.
    """

    forward: float
    inputs: float = 0.0
    weights: float = 0.0
    states: float = 0.0
    kept: float = 0.0
    output: float = 0.0
    name: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.inputs + self.weights

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a layer is {self.name!r}: give text")
        for name, value in asdict(self).items():
            if name != "name" and not _is_cost(value):
                raise ValueError(
                    f"the cost {name} of the layer {self.name!r} is {value!r}: give a number from 0 to 1e100"
                )


def _is_cost(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1e100


@dataclass(frozen=True)
class LayerCosts:
    """Costs of all layers of a list, of the messages between stages, and the speeds of the ranks.

    Attributes:
        layers: costs of each layer; the costs of the last one include the loss.
        latency: seconds of a message, without its bytes.
        per_byte: seconds of each byte of a message.
        speeds: speed of each rank of the pipe axis; a pass takes the layers' seconds divided by it. (): all have 1.
    """

    layers: Sequence[LayerCost]
    latency: float = 0.0
    per_byte: float = 0.0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("the costs have no layers: give the costs of at least one")
        for name in ("latency", "per_byte"):
            if not _is_cost(value := getattr(self, name)):
                raise ValueError(f"{name} is {value!r}: give seconds from 0 to 1e100")
        if isinstance(self.speeds, str) or not all(_is_cost(speed) and speed > 0 for speed in self.speeds):
            raise ValueError(f"speeds are {self.speeds!r}: give each rank of the pipe axis a number above 0")
        object.__setattr__(self, "speeds", tuple(map(float, self.speeds)))

    def speed_of(self, pipe: int) -> tuple[float, ...]:
        """Return the speed of each rank of a pipe axis.

        Raises:
            ValueError: there are speeds for another number of ranks.
        """
        if self.speeds and len(self.speeds) != pipe:
            raise ValueError(
                f"the costs have {len(self.speeds)} speeds for {pipe} ranks of the pipe axis: give each one"
            )
        return self.speeds or (1.0,) * pipe

    def of_stages(self, boundaries: Sequence[int], placement: Sequence[int]) -> Costs:
        """Return the costs of the stages of a cut, in seconds, for ``simulate``.

        Args:
            boundaries: stage s has the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.
            placement: the rank of each stage.
        """
        speeds = self.speed_of(max(placement) + 1)
        stages = [self.layers[start:stop] for start, stop in pairwise(boundaries)]
        passes = {
            kind: [
                sum(getattr(layer, name) for layer in stage) / speeds[rank] for stage, rank in zip(stages, placement)
            ]
            for kind, name in (("F", "forward"), ("I", "inputs"), ("W", "weights"))
        }
        messages = [self.latency + self.per_byte * stage[-1].output for stage in stages[:-1]]
        return Costs(F=passes["F"], I=passes["I"], W=passes["W"], COMM=messages)

    def to_json(self) -> str:
        """Return the costs as JSON, a line for each layer."""
        layers = ",\n  ".join(json.dumps(asdict(layer)) for layer in self.layers)
        rest = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "layers"}
        return f'{{"layers": [\n  {layers}\n ],\n {json.dumps(rest)[1:]}\n'

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> LayerCosts:
        """Read costs in the format of ``to_json``, from a file or an object.

        Raises:
            ValueError: the file is not there, or has other keys or values; the message names them.
        """
        where = "the costs" if isinstance(source, Mapping) else str(source)
        data = dict(
            source if isinstance(source, Mapping) else read_object(Path(source), object_pairs_hook=distinct_keys)
        )
        listed = data.get("layers")
        if not isinstance(listed, list) or not all(isinstance(one, Mapping) and "forward" in one for one in listed):
            raise ValueError(
                f'{where} must have "layers", a list of {{"forward": seconds, ...}}, not {describe(listed)}'
            )
        for kind, entries in ((cls, [data]), (LayerCost, listed)):
            names = [field.name for field in fields(kind)]
            if unknown := [key for entry in entries for key in entry if key not in names]:
                raise ValueError(no_such(where, str(unknown[0]), names))
        try:
            return cls(**{**data, "layers": tuple(LayerCost(**layer) for layer in listed)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
