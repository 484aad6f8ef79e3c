"""Model, machine, batch and sequence of a run: what all layouts of a search share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...data.mixture import Rows
from ...models.config import TransformerConfig
from .layer_shapes import LayerShape, layers_of
from .machine import Machine


@dataclass(frozen=True)
class Work:
    """Arguments of the formulas for the time of a step, beside the layout.

    Attributes:
        config: the model.
        machine: the machine.
        batch: sequences of a step over all replicas.
        sequence: tokens of a sequence.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``, with fp32 masters for the first two.
        products: dtype of the operands of the blocks' products, such as ``fp8`` or ``mxfp8``, cast for each of them;
            None: the precision.
        speeds: speed of each rank of the pipe axis over the machine's, as in ``LayerCosts``; (): all have 1.
        rows: rows of documents that the run trains on; None: all microbatches have the same work.
        balanced: ``batch.balance`` deals the documents of a step out by their work.
        lend: largest number of experts that a rank borrows.
    """

    config: TransformerConfig
    machine: Machine
    batch: int
    sequence: int
    precision: str = "bf16"
    products: str | None = None
    speeds: tuple[float, ...] = ()
    rows: Rows | None = None
    balanced: bool = False
    lend: int = 0

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        """Shapes of the model's layers."""
        return layers_of(self.config)

    @cached_property
    def model_flops(self) -> float:
        """Floating-point operations of a step without recomputation.

        Narayanan et al. 2021, equation 3, without its recomputation: three times the forward pass, with attention to
        all tokens of the sequence.
        """
        return 3 * self.batch * self.sequence * sum(map(self._forward_flops, self.layers))

    def _forward_flops(self, layer: LayerShape) -> float:
        """Return the operations of one token's forward pass."""
        flops = sum(2.0 * product.inputs * product.outputs * product.times for product in layer.products)
        if layer.attention:
            sizes = layer.attention
            flops += 2.0 * self.sequence * sizes.heads * (sizes.query_dim + sizes.value_dim)
        return flops
