"""Seconds of one microbatch in one layer on one rank, term by term. Bytes are those that triax moves.

    forward   products  attention  elementwise  | all-gather   reduce-scatter  | all-to-all x 2 | Python
    inputs    products  attention  elementwise  | the same, behind the weights | all-to-all x 2 | Python
    weights   products

| term | seconds | source |
|---|---|---|
| product m x k x n | the longer of 2mkn / (peak x efficiency x full tiles) and bytes / memory speed | \
device_time.py |
| product in fp8 | the same with the peak of fp8, and the writes of both operands' casts | Transformer Engine |
| attention, fused | causal FLOPs / (peak x efficiency); backward 2.5 times as many, a fifth slower | \
arXiv:2307.08691, section 4.1 |
| attention, not fused | two batched products, and 13 bytes a score forward, 17 backward | Korthikanti et al. 2022, \
figure 3 |
| elementwise | bytes read and written / memory speed | the same, section 4.1, with the reads |
| tensor | all-gather and reduce-scatter of 2 s b h bytes for each branch. In the backward pass the weight gradients \
hide one of the two; a schedule that splits them off shows both, and gathers their input again \
| tensor_parallel/column.py |
| context | K and V around the ring, twice as much backward, behind the core of attention | arXiv:2310.01889 |
| expert | two all-to-alls forward, two backward | arXiv:2101.03961 |
| overhead | Python of a layer; where kernels are launched ahead, what they do not hide | measured |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .collectives import RankGroup, all_reduce, all_to_all, reduce_scatter
from .device_time import DeviceTime
from .layer_shapes import Attention, Feedforward, LayerShape, MatrixProduct
from .parallel_layout import ParallelLayout

BACKWARD_ATTENTION = 2.5 * 1.2  # FlashAttention's backward pass over its forward pass
SCORE_BYTES = 9.0, 11.0  # of softmax and dropout, forward and backward; the products read and write the rest
LOGIT_BYTES = 22.0, 28.0  # fp32 cross entropy: cast, maximum, exponentials, sum; softmax minus one-hot, scaled, cast


LAYER_KINDS = ("products", "attention", "elementwise", "tensor", "context", "expert", "overhead")


class Both(NamedTuple):
    """Seconds, or bytes, of a forward and a backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    @classmethod
    def total(cls, terms: Iterable[KernelTerm]) -> Both:
        """Return the sum of terms."""
        listed = list(terms)
        return cls(sum((term.forward for term in listed), 0.0), sum((term.backward for term in listed), 0.0))


class KernelTerm(NamedTuple):
    """Kernels of a layer: a name, and their seconds, or bytes, in the forward and the backward pass."""

    name: str
    forward: float
    backward: float


class ProductTime(NamedTuple):
    """Seconds of products: forward, gradients of the inputs, gradients of the weights."""

    forward: float
    inputs: float
    weights: float


class TensorTime(NamedTuple):
    """Seconds of the collectives of the tensor axis.

    Attributes:
        forward: in the forward pass.
        backward: in the backward pass, which the weight gradients do not hide.
        split_inputs, split_weights: in addition, where a schedule splits the backward pass, so that nothing hides
            them: in the pass of input gradients, and in that of weight gradients.
    """

    forward: float = 0.0
    backward: float = 0.0
    split_inputs: float = 0.0
    split_weights: float = 0.0


class LayerTime(NamedTuple):
    """Seconds of one microbatch in a layer on one rank, by kind.

    Attributes:
        products, attention, elementwise, tensor, context, expert, overhead: seconds by kind.
        mlp: seconds of the MLP's forward pass, which are part of them.
    """

    products: ProductTime
    attention: Both
    elementwise: Both
    tensor: TensorTime
    context: Both
    expert: Both
    overhead: Both
    mlp: float

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return sum(getattr(self, kind)[0] for kind in LAYER_KINDS)

    @property
    def backward(self) -> float:
        """Seconds of the backward pass without the weight gradients of products."""
        return sum(getattr(self, kind)[1] for kind in LAYER_KINDS)


class TimeSplit(NamedTuple):
    """The part of a layout on which the time of a layer depends.

    Attributes:
        microbatch, context, tensor, expert, slices: as in ``ParallelLayout``.
        sequence_parallel: the hidden states are sharded over the sequence.
    """

    microbatch: int
    context: int
    tensor: int
    expert: int
    sequence_parallel: bool
    slices: int

    @classmethod
    def of(cls, layout: ParallelLayout) -> TimeSplit:
        """Return the part of a layout."""
        axes = layout.microbatch, layout.context, layout.tensor, layout.expert
        return cls(*axes, bool(layout.sequence_parallel), layout.slices)


@dataclass(frozen=True)
class LayerTimer:
    """One layer on one rank, whose times are asked for.

    Attributes:
        device: times of kernels.
        shape: the layer.
        split: the part of the layout that counts.
    """

    device: DeviceTime
    shape: LayerShape
    split: TimeSplit

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch, or of a slice, on this rank."""
        return self.split.microbatch * self.device.work.sequence // (self.split.context * self.split.slices)

    @cached_property
    def held(self) -> float:
        """Tokens of the hidden states that this rank holds."""
        return self.tokens / self.split.tensor if self.split.sequence_parallel else float(self.tokens)

    @property
    def group(self) -> RankGroup:
        """The tensor axis."""
        return RankGroup(self.split.tensor)

    def time(self) -> LayerTime:
        """Return the times of the layer."""
        shape = self.shape
        each = [(product, self._product(product)) for product in shape.products]
        products = ProductTime(*(sum((time[i] for _, time in each), 0.0) for i in range(3)))
        attention = self._attention(shape.attention) if shape.attention else Both()
        elementwise = self._elementwise()
        column = sum((time.weights for product, time in each if product.sharding == "column"), 0.0)
        tensor = self._tensor(column)
        expert = self._expert(shape.feedforward) if self._experts and shape.feedforward else Both()
        mlp = sum((time.forward for product, time in each if product.weight.startswith("mlp.")), 0.0)
        if shape.kind == "block":  # half of the elementwise kernels, and one of the branches
            branch = tensor.forward / self._branches if self._branches else 0.0
            mlp = mlp + elementwise.forward / 2 + expert.forward + branch
        return LayerTime(
            products=products,
            attention=attention,
            elementwise=elementwise,
            tensor=tensor,
            context=self._context(shape.attention, attention) if shape.attention else Both(),
            expert=expert,
            overhead=self._overhead(products, attention, elementwise),
            mlp=mlp,
        )

    # ---------------------------------------------------------------------------------------------- products

    @cached_property
    def _experts(self) -> set[str]:
        """Names of the experts' weights."""
        return {weight.name for weight in self.shape.weights if weight.expert_dim is not None}

    def _product(self, product: MatrixProduct) -> ProductTime:
        m, k, n, calls = self._product_sizes(product)
        device = self.device
        if device.measured is not None:
            shares = device.measured.product(device.work.precision, m, k, n)
            operations = 2 * m * k * n * calls * device.slowdown
            return ProductTime(*(operations / (device.peak * share) for share in shares))
        narrow = device.narrow and self.shape.kind == "block"
        cast, back = 0.0, 0.0
        if narrow:
            # The kernel that makes the inputs writes them as they are and transposed; the gradient is read for it.
            # Weights are cast once a step.
            cast, back = device.moved(2 * m * k * calls), device.moved((device.bytes + 2) * m * n * calls)
        return ProductTime(
            device.product(m, k, n, calls, narrow=narrow) + cast,
            device.product(m, n, k, calls, narrow=narrow) + back,
            device.product(k, m, n, calls, output=2 * device.wide, narrow=narrow),  # gradients are read and written
        )

    def _product_sizes(self, product: MatrixProduct) -> tuple[int, int, int, int]:
        """Return m, k and n of a product on this rank, and the number of calls."""
        t, m, k, n = self.split.tensor, self.tokens, product.inputs, product.outputs
        if product.sharding == "column" and product.heads and product.heads % t:
            n = n // product.heads * max(1, product.heads // t)
        elif product.sharding == "column":
            n = math.ceil(n / t)
        elif product.sharding == "row":
            k = math.ceil(k / t)
        elif self.shape.kind in ("block", "projection"):
            m = math.ceil(self.held)
        if product.weight not in self._experts:
            return m, k, n, 1
        assert self.shape.feedforward is not None
        calls = max(1, self.shape.feedforward.experts // self.split.expert)
        return max(1, round(m * product.times / calls)), k, n, calls

    # --------------------------------------------------------------------------------------------- attention

    def _attention(self, sizes: Attention) -> Both:
        """Return the seconds of the core of attention."""
        device, heads = self.device, math.ceil(sizes.heads / self.split.tensor)
        if not device.machine.fused_attention:
            return self._plain_attention(sizes, heads)
        sequence = device.work.sequence
        window = min(sizes.window or sequence, sequence)
        keys = window * (1 - window / (2 * sequence))  # that a token sees, on average
        forward = 2 * self.tokens * keys * heads * (sizes.query_dim + sizes.value_dim)
        if device.measured is None:
            forward /= device.peak * device.machine.attention_efficiency
            return Both(forward, BACKWARD_ATTENTION * forward)
        width, context = (sizes.query_dim + sizes.value_dim) / 2, self.split.context
        block = sequence if context == 1 else sequence / (2 * context)  # of the zigzag order
        shares = device.measured.attention_core(device.work.precision, min(window, block), width)
        forward *= device.slowdown
        return Both(forward / (device.peak * shares[0]), forward / (device.peak * shares[1]))

    def _plain_attention(self, sizes: Attention, heads: int) -> Both:
        device, split, sequence = self.device, self.split, self.device.work.sequence
        rows, calls = sequence // (split.context * split.slices), split.microbatch * heads
        scores = device.moved(calls * rows * sequence)
        first = device.product(rows, sizes.query_dim, sequence, calls)
        second = device.product(rows, sequence, sizes.value_dim, calls)
        return Both(first + second + SCORE_BYTES[0] * scores, first + 3 * second + SCORE_BYTES[1] * scores)

    def _context(self, sizes: Attention, attention: Both) -> Both:
        """Return the seconds of ring attention's messages that the core of attention does not hide."""
        device, split = self.device, self.split
        if split.context == 1:
            return Both()
        heads = math.ceil(sizes.kv_heads / split.tensor)
        tokens = split.microbatch * device.work.sequence
        whole = device.bytes * tokens * heads * (sizes.query_dim + sizes.value_dim)
        once = reduce_scatter(whole, RankGroup(split.context, split.tensor), device.machine)
        call = device.call("context")
        if device.on_cores:
            return Both(once + call, 2 * (once + call))
        return Both(max(0.0, once - attention.forward) + call, max(0.0, 2 * once - attention.backward) + 2 * call)

    # ------------------------------------------------------------------------------------------- other kernels

    def _elementwise(self) -> Both:
        """Return the seconds of all kernels but products and attention."""
        if self.device.measured is not None:
            return Both.total(self._measured_kernels())
        moved = Both.total(self._moved_bytes())
        return Both(self.device.moved(moved.forward), self.device.moved(moved.backward))

    def _moved_bytes(self) -> Iterator[KernelTerm]:
        """Yield the bytes that kernels read and write."""
        shape, size, hidden = self.shape, self.device.bytes, self.held * self.shape.hidden
        yield KernelTerm("norms", 2 * size * shape.norms * hidden, 4 * size * shape.norms * hidden)
        if shape.kind in ("embedding", "positions"):
            yield KernelTerm("rows of the table", 2 * size * hidden, 4 * size * hidden)
        elif shape.kind == "head":
            logits = self._logits
            yield KernelTerm("cross entropy", LOGIT_BYTES[0] * logits, LOGIT_BYTES[1] * logits)
        elif shape.kind == "block":
            yield from self._moved_bytes_of_block(hidden)

    def _moved_bytes_of_block(self, hidden: float) -> Iterator[KernelTerm]:
        shape, size, mask = self.shape, self.device.bytes, float(self.shape.dropout)
        sizes, mlp = shape.attention, shape.feedforward
        assert sizes is not None and mlp is not None
        # Residual and bias are added to the output of each branch.
        yield KernelTerm("residuals", 2 * (3 * size + mask) * hidden, 2 * (2 * size + mask) * hidden)
        projected = sizes.heads * sizes.query_dim + sizes.kv_heads * (sizes.query_dim + sizes.value_dim)
        kernels = 1 + bool(sizes.rotated) + sizes.norms  # transposed, rotated, normalized
        moved = kernels * size * self.tokens * (projected / self.split.tensor)
        yield KernelTerm("queries, keys, values", moved, moved)
        tokens, activation = self._mlp_sizes(mlp)
        factors = (3, 4.5) if mlp.gated else (2, 3)
        yield KernelTerm("activation of the MLP", factors[0] * size * activation, factors[1] * size * activation)
        if mlp.experts:
            ordered = 4 * size * tokens * mlp.per_token * shape.hidden
            yield KernelTerm("tokens in the order of their experts and back", ordered, ordered)

    def _measured_kernels(self) -> Iterator[KernelTerm]:
        """Yield the measured seconds of kernels."""
        shape, hidden, kernel = self.shape, self.held * self.shape.hidden, self.device.kernel
        for weight in shape.weights:
            own = weight.numel / (self.split.tensor if weight.shards_over(self.split.tensor) else 1)
            yield KernelTerm("gradients added to those before", 0.0, kernel("accumulate", own)[0])
            if shape.kind == "block" and weight.name.endswith(".bias") and "norm" not in weight.name:
                yield KernelTerm("gradient of a bias", 0.0, kernel("bias", self.tokens * own)[0])
        if shape.norms:
            forward, backward = kernel("layer_norm" if shape.norm.startswith("layer") else "rms_norm", hidden)
            yield KernelTerm("norms", shape.norms * forward, shape.norms * backward)
        if shape.kind == "embedding":
            yield KernelTerm("rows of the table", *kernel("embedding", hidden))
        elif shape.kind == "positions":
            yield KernelTerm("sum with the positions", kernel("add", hidden)[0], kernel("bias", hidden)[0])
        elif shape.kind == "head":
            yield KernelTerm("cross entropy", *kernel("loss", self._logits))
        elif shape.kind == "block":
            yield from self._measured_kernels_of_block(hidden)

    def _measured_kernels_of_block(self, hidden: float) -> Iterator[KernelTerm]:
        shape, kernel, t = self.shape, self.device.kernel, self.split.tensor
        sizes, mlp = shape.attention, shape.feedforward
        assert sizes is not None and mlp is not None
        residuals = 2 * kernel("add", hidden)[0]
        if shape.dropout:
            forward, backward = kernel("dropout", hidden)
            yield KernelTerm("dropout", 2 * forward, 2 * backward)
        queries, values = sizes.heads * sizes.query_dim / t, sizes.heads * sizes.value_dim / t
        keys = sizes.kv_heads * (sizes.query_dim + sizes.value_dim) / t
        yield KernelTerm("residuals", residuals, residuals)
        yield KernelTerm("output by heads", *kernel("by_heads", self.tokens * values))
        yield KernelTerm("projections by heads", 0.0, kernel("by_heads", self.tokens * (queries + keys))[1])
        if sizes.rotated:
            channels = self.tokens * (sizes.heads + sizes.kv_heads) / t * sizes.rotated
            yield KernelTerm("rotation", *kernel("rotated", channels))
        tokens, activation = self._mlp_sizes(mlp)
        yield KernelTerm("activation of the MLP", *kernel("gated" if mlp.gated else "gelu", activation))
        if mlp.experts:
            ordered = kernel("by_heads", 2 * tokens * mlp.per_token * shape.hidden)
            yield KernelTerm("tokens in the order of their experts and back", *ordered)

    @property
    def _logits(self) -> int:
        """Number of logits on this rank."""
        return self.tokens * math.ceil(self.shape.products[0].outputs / self.split.tensor)

    def _mlp_sizes(self, mlp: Feedforward) -> tuple[float, float]:
        """Return the tokens of this rank's MLP, and the elements of its activation."""
        products = self.shape.products
        sharded = any(product.weight.startswith("mlp.") and product.sharding != "none" for product in products)
        tokens = self.tokens / self.split.tensor if sharded else self.held
        return tokens, tokens * (mlp.width * (mlp.per_token or 1) + mlp.shared)

    # -------------------------------------------------------------------------------------------- collectives

    @cached_property
    def _branches(self) -> int:
        """Number of the block's modules that the tensor axis shards, such as attention and MLP."""
        sharded = (product for product in self.shape.products if product.sharding != "none")
        return len({product.weight.partition(".")[0] for product in sharded})

    def _tensor(self, column: float) -> TensorTime:
        """Return the seconds of the collectives of the tensor axis.

        Args:
            column: seconds of the weight gradients of column-parallel products, which hide the gradients' sum.
        """
        device = self.device
        if self.split.tensor == 1:
            return TensorTime()
        if device.on_cores or not device.machine.overlap_tensor:
            column = 0.0  # the transport takes the core that computes the weight gradients, or the software waits
        sequence_parallel, hidden = self.split.sequence_parallel, device.bytes * self.tokens * self.shape.hidden
        once = (reduce_scatter if sequence_parallel else all_reduce)(hidden, self.group, device.machine)
        if self.shape.kind == "embedding":
            return TensorTime(once, once if sequence_parallel else 0.0)
        if self.shape.kind == "head":
            gather = once if sequence_parallel else 0.0
            loss = 3 * all_reduce(4.0 * self.tokens, self.group, device.machine)
            return TensorTime(gather + loss, max(0.0, once - column), min(once, column), gather)
        return self._tensor_of_block(column, self._branches * once) if self.shape.kind == "block" else TensorTime()

    def _tensor_of_block(self, column: float, once: float) -> TensorTime:
        """Return the seconds of a block, of whose branches one collective each takes ``once`` together.

        That is an all-reduce. Under sequence parallelism it is an all-gather or a reduce-scatter: each branch has one
        of both forward; backward it gathers its gradient, sums its input's, and gathers its input for the weights.
        """
        device, call = self.device, self._branches * self.device.call("tensor")
        shown = max(0.0, once - column)
        if not self.split.sequence_parallel:
            return TensorTime(once + call, shown + call, min(once, column))
        again = 0.0 if device.machine.overlap_tensor or device.on_cores else once  # the input, gathered in plain sight
        return TensorTime(2 * once + 2 * call, once + shown + again + 3 * call, min(once, column), once - again)

    def _expert(self, mlp: Feedforward) -> Both:
        """Return the seconds of the all-to-alls of a mixture of experts."""
        device, split = self.device, self.split
        sent = device.bytes * self.held * mlp.per_token * self.shape.hidden
        call = device.call("expert") if split.expert > 1 else 0.0
        both = 2 * (all_to_all(sent, RankGroup(split.expert, split.tensor), device.machine) + call)
        return Both(both, both)

    # ------------------------------------------------------------------------------------------------- Python

    def _overhead(self, products: ProductTime, attention: Both, elementwise: Both) -> Both:
        """Return the seconds of Python of a layer that its kernels do not hide."""
        device = self.device
        if device.measured is None or self.shape.kind != "block":
            return Both()
        forward, backward = device.measured.layer(self.shape.name)
        if device.on_cores:
            return Both(forward, backward)
        hidden = products.forward + attention.forward + elementwise.forward
        return Both(
            max(0.0, forward - hidden),
            max(0.0, backward - (products.inputs + products.weights + attention.backward)),
        )
