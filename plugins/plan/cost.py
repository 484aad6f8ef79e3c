"""Time of a training step on a layout, term by term, from the shapes of the layers and a machine's description.

A pass of a microbatch through a layer consists of matrix products, the core of attention, elementwise kernels, and the
collectives of the tensor, context and expert axes. A step consists of the passes of the busiest pipe rank, the bubble
of the schedule, messages between stages, the data axis (ZeRO) and the optimizer. Bytes are those that triax moves.

| term | seconds | source |
|---|---|---|
| product m x k x n | the longer of 2mkn / (peak x efficiency x full tiles) and bytes / memory speed | roofline, \
Williams et al. 2009; tiles and waves: NVIDIA's guide to matrix multiplication |
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
| recompute | the forward pass (full), that of the MLP (mlp), or the core of attention (selective) | \
Korthikanti et al. 2022 |
| bubble | idle time of the schedule, with all other pipe ranks' times | pipe/schedules, docs/schedules.md |
| pipe | each pass waits for its message, 2 s b h bytes (1/t of them under sequence parallelism), and for the \
software's overhead | Narayanan et al. 2021 |
| data | plan/formulas.zero_traffic | Rajbhandari et al. 2020, section 7 |
| optimizer | Adam reads and writes 34 bytes a parameter in mixed precision | plan/formulas.model_states |
| offload | gradients to the CPU and weights back; Adam at the speed of its memory | arXiv:2101.06840 |
| overhead | Python of a layer, a microbatch and a step; where kernels are launched ahead, what they do not hide | \
measured |
| cores | waiting for a core that other ranks of the machine use | plugins/plan/cores.py |

On a machine of ``triax plan measure`` products, attention, elementwise kernels, collectives, AdamW and the overhead
are those measured (plugins/plan/measured.py). Where ranks compute on shared cores, nothing hides a collective, because
the transport computes too, and the schedule is simulated with equal shares of the cores (plugins/plan/cores.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

from ...base.formulas import BYTES, model_states
from ...engine.setup.asked_schedule import with_passes
from ...models.config import TransformerConfig
from ...options.schedule import OffloadActivations, ScheduleOptions
from ...pipe.program.costs import Costs
from ...pipe.program.layer_costs import LayerCost, LayerCosts
from ...pipe.program.schedule import Schedule
from ...pipe.program.simulate import timeline_of
from ...pipe.program.slices import equal_cost_slices
from ...pipe.program.timeline import Timeline
from ...pipe.schedules.registry import RECIPES, named_schedule
from .collectives import RankGroup, all_gather, all_reduce, all_to_all, message, reduce_scatter
from .cores import StageWork, makespan
from .layer_shapes import Attention, Feedforward, LayerShape, MatrixProduct, layers_of
from .machine import Machine
from .measured import MeasuredTimes, interpolated
from .memory import ModelMemory
from .parallel_layout import UNCHANGED, ParallelLayout

KINDS = (
    *("products", "attention", "elementwise", "overhead", "recompute", "tensor", "context", "expert"),
    *("pipe", "bubble", "cores", "data", "optimizer", "offload"),
)
BACKWARD_ATTENTION = 2.5 * 1.2  # FlashAttention's backward pass over its forward pass
SCORE_BYTES = 9.0, 11.0  # of softmax and dropout, forward and backward; the products read and write the rest
LOGIT_BYTES = 22.0, 28.0  # fp32 cross entropy: cast, maximum, exponentials, sum; softmax minus one-hot, scaled, cast
ADAM_BYTES = 34.0  # gradient twice (norm, update), master and two moments read and written, weight written


class LayerTime(NamedTuple):
    """Seconds of one microbatch in a layer on one rank: forward, input gradients, weight gradients, by kind."""

    products: tuple[float, float, float]
    attention: tuple[float, float]  # forward, backward
    elementwise: tuple[float, float]
    tensor: tuple[float, float]
    context: tuple[float, float]
    expert: tuple[float, float]
    overhead: tuple[float, float] = (0.0, 0.0)

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return sum(part[0] for part in self)

    @property
    def backward(self) -> float:
        """Seconds of the backward pass without the weight gradients of products."""
        return sum(part[1] for part in self)


class PassTime(NamedTuple):
    """Seconds of one microbatch in some layers on one rank: of each pass, and the same time by kind.

    Attributes:
        forward, inputs, weights: seconds of the forward pass, of input gradients and of weight gradients.
        recompute: seconds of the forward pass that runs again, in addition.
        products, attention, elementwise, tensor, context, expert, overhead: seconds of forward, inputs and weights
            together.
    """

    forward: float
    inputs: float
    weights: float
    recompute: float
    products: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    expert: float
    overhead: float

    @classmethod
    def total(cls, times: Iterable[PassTime]) -> PassTime:
        """Return the sum of some times; zeros of none."""
        return cls(*map(sum, zip(_NO_TIME, *times)))

    @property
    def busy(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.inputs + self.weights + self.recompute

    def kinds(self, microbatches: float = 1.0) -> dict[str, float]:
        """Return the seconds of some microbatches by kind, without the recomputation."""
        return {name: microbatches * getattr(self, name) for name in LayerTime._fields}


_NO_TIME = (0.0,) * len(PassTime._fields)


class StepTime(NamedTuple):
    """Time of a step: seconds in all and by kind."""

    seconds: float
    kinds: dict[str, float]


@dataclass(frozen=True)
class Work:
    """Model, machine, batch and sequence of a run: the arguments that all layouts of a search share.

    Attributes:
        config: the model.
        machine: the machine.
        batch: sequences of a step over all replicas.
        sequence: tokens of a sequence.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``, with fp32 masters for the first two.
        products: dtype of the operands of the blocks' products, such as ``fp8`` or ``mxfp8``, cast for each of them;
            None: the precision.
        speeds: speed of each rank of the pipe axis over the machine's, as in ``LayerCosts``; (): all have 1.
        document_mask: as for ``ModelMemory``. The times are those without it.
    """

    config: TransformerConfig
    machine: Machine
    batch: int
    sequence: int
    precision: str = "bf16"
    products: str | None = None
    speeds: tuple[float, ...] = ()
    document_mask: bool = False

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


class CostModel:
    """Times of layers and steps, each computed once and kept.

    Args:
        work: model, machine, batch and sequence.

    Attributes:
        types: the different layers of the model.
        memory: memory of the model, which cuts it into the same stages.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.machine = work, work.machine
        self.bytes = BYTES[work.precision]
        self.peak = work.machine.peak_of(work.precision)
        self.narrow = work.products not in (None, work.precision)
        self.product_peak = work.machine.peak_of(work.products or work.precision)
        self.types = list(dict.fromkeys(work.layers))
        self.kinds = [self.types.index(layer) for layer in work.layers]
        self._layers: dict[tuple[int, ...], LayerTime] = {}
        self._speeds: dict[int, float] = {}
        self.measured = work.machine.measured
        self.on_cores = self.measured is not None and self.measured.cores > 0
        blocks = [layer.name for layer in work.layers if layer.kind == "block"]
        self.slowdown = self.measured.slowdown(blocks[0]) if self.measured is not None else 1.0
        if self.measured is not None and work.precision not in self.measured.products:
            raise ValueError(
                f"the machine {work.machine.name} was measured in {', '.join(self.measured.products)}, not in "
                f"{work.precision}. Give --precision with one of them."
            )
        if work.speeds and self.on_cores:
            raise ValueError("ranks that share cores cannot have different speeds. Leave --speeds out.")
        device = "cpu" if self.on_cores else "cuda"
        self.memory = ModelMemory(
            *(work.config, work.precision),
            fused_attention=work.machine.fused_attention,
            fused_kernels=work.machine.fused_kernels,
            speeds=work.speeds,
            device=device,
            document_mask=work.document_mask,
        )
        # Seconds that a split backward pass adds, because nothing hides the collectives of the tensor axis: to the
        # input gradients, and to the weight gradients.
        self._shown: dict[tuple[int, ...], tuple[float, float]] = {}
        self._mlp: dict[tuple[int, ...], float] = {}  # seconds of the forward pass of a block's MLP
        self._ranks: dict[tuple[int, int, bool], list[tuple[tuple[int, ...], int]]] = {}
        self._parameters: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._simulated: dict[tuple[object, ...], float] = {}
        self._schedules: dict[tuple[object, ...], Schedule] = {}  # with options
        self._timelines: dict[tuple[object, ...], Timeline] = {}  # of them
        self._totals: dict[tuple[object, ...], PassTime] = {}
        self._groups: dict[tuple[object, ...], list[tuple[float, RankGroup]]] = {}
        self._scatters: dict[tuple[float, RankGroup], float] = {}
        self._last: tuple[tuple[object, ...], list[_RankTime]] = ((), [])  # of the layouts that were asked for last

    # ------------------------------------------------------------------------------------------------ a layer

    def product(self, m: int, k: int, n: int, calls: int = 1, output: float = 0, narrow: bool = False) -> float:
        """Return the seconds of ``calls`` products of an m x k and a k x n matrix.

        Args:
            m, k, n: sizes of the matrices.
            calls: number of products.
            output: bytes of an element of the result; by default those of the precision.
            narrow: the operands are of the dtype ``work.products``, with one byte an element.
        """
        machine = self.machine
        rows, columns = machine.tile
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * calls
        full = m * n * calls / (tiles * rows * columns)  # share of the tiles that is used
        waves = math.ceil(tiles / machine.units) * machine.units / tiles
        peak = self.product_peak if narrow else self.peak
        compute = 2 * m * k * n * calls * waves / (peak * machine.product_efficiency * full)
        moved = ((1 if narrow else self.bytes) * (m * k + k * n) + (output or self.bytes) * m * n) * calls
        return max(compute, moved / machine.elementwise_speed)

    def layer(self, kind: int, layout: ParallelLayout) -> LayerTime:
        """Return the times of one microbatch, or of one of its slices, in a layer of type ``self.types[kind]``."""
        sharded = bool(layout.sequence_parallel)
        key = (kind, layout.microbatch, layout.context, layout.tensor, layout.expert, sharded, layout.slices)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._layer(self.types[kind], layout, sharded, key)
        return found

    def _layer(self, shape: LayerShape, layout: ParallelLayout, sharded: bool, key: tuple[int, ...]) -> LayerTime:
        t, machine, size = layout.tensor, self.machine, self.bytes
        tokens = layout.microbatch * self.work.sequence // (layout.context * layout.slices)
        held = tokens / t if sharded else float(tokens)  # tokens of the hidden states that a rank holds
        forward = inputs = weights = column = mlp = 0.0
        sharded_products: set[str] = set()
        experts = {weight.name for weight in shape.weights if weight.expert_dim is not None}
        for product in shape.products:
            times = self._product_times(product, shape, layout, tokens, held, product.weight in experts)
            forward, inputs, weights = (a + b for a, b in zip((forward, inputs, weights), times, strict=True))
            mlp += times[0] if product.weight.startswith("mlp.") else 0.0
            if product.sharding != "none":
                sharded_products.add(product.weight.partition(".")[0])
                column += times[2] if product.sharding == "column" else 0.0
        attention = self._attention(shape.attention, tokens, layout) if shape.attention else (0.0, 0.0)
        if self.measured is None:
            moved = self._elementwise(shape, tokens, held, t)
            elementwise = moved[0] / machine.elementwise_speed, moved[1] / machine.elementwise_speed
        else:
            elementwise = self._kernels(self.measured, shape, tokens, held, t)
        if self.on_cores or not machine.overlap_tensor:
            column = 0.0  # the transport takes the core that computes the weight gradients, or the software waits
        # the tensor axis
        hidden = size * tokens * shape.hidden
        branches = len(sharded_products) if shape.kind == "block" else int(shape.kind in ("embedding", "head"))
        group = RankGroup(t)
        once = reduce_scatter(hidden, group, machine)
        if t == 1 or not branches:
            tensor = (0.0, 0.0)
        elif shape.kind == "embedding":
            tensor = (once, once) if sharded else (all_reduce(hidden, group, machine), 0.0)
        elif shape.kind == "head":
            loss = 3 * all_reduce(4.0 * tokens, group, machine)
            hidden_reduce = once if sharded else all_reduce(hidden, group, machine)
            tensor = ((once if sharded else 0.0) + loss, max(0.0, hidden_reduce - column))
            self._shown[key] = min(hidden_reduce, column), once if sharded else 0.0
        elif sharded:
            again = 0.0 if machine.overlap_tensor or self.on_cores else branches * once  # inputs gathered again
            tensor = (2 * branches * once, branches * once + max(0.0, branches * once - column) + again)
            self._shown[key] = min(branches * once, column), branches * once - again
        else:
            reduce = branches * all_reduce(hidden, group, machine)
            tensor = (reduce, max(0.0, reduce - column))
            self._shown[key] = min(reduce, column), 0.0
        if t > 1 and shape.kind == "block":
            call = branches * self._call("tensor")
            tensor = tensor[0] + (2 if sharded else 1) * call, tensor[1] + (3 if sharded else 1) * call
        sent = self._expert(shape, layout, held) if experts else (0.0, 0.0)
        if shape.kind == "block":  # half of the elementwise kernels, and one of the branches
            self._mlp[key] = mlp + elementwise[0] / 2 + sent[0] + (tensor[0] / branches if branches else 0.0)
        return LayerTime(
            (forward, inputs, weights),
            attention,
            elementwise,
            tensor,
            self._context(shape.attention, layout, attention) if shape.attention else (0.0, 0.0),
            sent,
            self._overhead(shape, forward + attention[0] + elementwise[0], inputs + weights + attention[1]),
        )

    def _overhead(self, shape: LayerShape, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of Python of a layer that its kernels do not hide."""
        if self.measured is None or shape.kind != "block":
            return 0.0, 0.0
        ahead, back = self.measured.layer(shape.name)
        return (ahead, back) if self.on_cores else (max(0.0, ahead - forward), max(0.0, back - backward))

    def _kernels(
        self, measured: MeasuredTimes, shape: LayerShape, tokens: int, held: float, t: int
    ) -> tuple[float, float]:
        """Return the measured seconds of all kernels but products and attention, forward and backward."""
        h, forward, backward = shape.hidden, 0.0, 0.0

        def time(name: str, elements: float) -> tuple[float, float]:
            forward, backward = measured.kernel(self.work.precision, name, elements)
            return self.slowdown * forward, self.slowdown * backward

        for weight in shape.weights:  # gradients are added to those of earlier microbatches
            own = weight.numel / (t if weight.shards_over(t) else 1)
            backward += time("accumulate", own)[0]
            if shape.kind == "block" and weight.name.endswith(".bias") and "norm" not in weight.name:
                backward += time("bias", tokens * own)[0]
        if shape.norms:
            norm = time("layer_norm" if shape.norm.startswith("layer") else "rms_norm", held * h)
            forward, backward = forward + shape.norms * norm[0], backward + shape.norms * norm[1]
        if shape.kind == "embedding":
            looked = time("embedding", held * h)
            return forward + looked[0], backward + looked[1]
        if shape.kind == "positions":
            return forward + time("add", held * h)[0], backward + time("bias", held * h)[0]
        if shape.kind == "head":
            loss = time("loss", tokens * math.ceil(shape.products[0].outputs / t))
            return forward + loss[0], backward + loss[1]
        if shape.kind != "block":
            return forward, backward
        assert shape.attention is not None and shape.feedforward is not None
        sizes, mlp = shape.attention, shape.feedforward
        residual = 2 * time("add", held * h)[0]
        if shape.dropout:
            dropped = time("dropout", held * h)
            forward, backward = forward + 2 * dropped[0], backward + 2 * dropped[1]
        queries, values = sizes.heads * sizes.query_dim / t, sizes.heads * sizes.value_dim / t
        keys = sizes.kv_heads * (sizes.query_dim + sizes.value_dim) / t
        output, projected = time("by_heads", tokens * values), time("by_heads", tokens * (queries + keys))
        forward, backward = forward + residual + output[0], backward + residual + output[1] + projected[1]
        if sizes.rotated:
            rotated = time("rotated", tokens * (sizes.heads + sizes.kv_heads) / t * sizes.rotated)
            forward, backward = forward + rotated[0], backward + rotated[1]
        each, width = _mlp_sizes(shape, mlp, tokens / t, held)
        activation = time("gated" if mlp.gated else "gelu", width)
        forward, backward = forward + activation[0], backward + activation[1]
        if mlp.experts:  # tokens are put in the order of their experts and back
            ordered = time("by_heads", 2 * each * mlp.per_token * h)
            forward, backward = forward + ordered[0], backward + ordered[1]
        return forward, backward

    def _product_times(
        self, product: MatrixProduct, shape: LayerShape, layout: ParallelLayout, tokens: int, held: float, routed: bool
    ) -> tuple[float, float, float]:
        """Return the seconds of a product, of its input gradients and of its weight gradients."""
        t, m, k, n, calls = layout.tensor, tokens, product.inputs, product.outputs, 1
        if product.sharding == "column":
            if product.heads and product.heads % t:
                n = n // product.heads * max(1, product.heads // t)
            else:
                n = math.ceil(n / t)
        elif product.sharding == "row":
            k = math.ceil(k / t)
        elif shape.kind in ("block", "projection"):
            m = math.ceil(held)
        if routed:
            assert shape.feedforward is not None
            calls = max(1, shape.feedforward.experts // layout.expert)
            m = max(1, round(m * product.times / calls))
        if self.measured is not None:
            shares = self.measured.product(self.work.precision, m, k, n)
            operations = 2 * m * k * n * calls * self.slowdown
            forward, inputs, weights = (operations / (self.peak * share) for share in shares)
            return forward, inputs, weights
        narrow = self.narrow and shape.kind == "block"
        cast, back = 0.0, 0.0
        if narrow:
            # The kernel that makes the inputs writes them as they are and transposed; the gradient is read for it.
            # Weights are cast once a step.
            cast, back = (
                size * calls / self.machine.elementwise_speed for size in (2 * m * k, (self.bytes + 2) * m * n)
            )
        return (
            self.product(m, k, n, calls, narrow=narrow) + cast,
            self.product(m, n, k, calls, narrow=narrow) + back,
            # fp32 gradients are read and written
            self.product(k, m, n, calls, output=2 * max(4, self.bytes), narrow=narrow),
        )

    def _attention(self, sizes: Attention, tokens: int, layout: ParallelLayout) -> tuple[float, float]:
        """Return the seconds of the core of attention, forward and backward."""
        sequence, t, machine = self.work.sequence, layout.tensor, self.machine
        heads = math.ceil(sizes.heads / t)
        if machine.fused_attention:
            window = min(sizes.window or sequence, sequence)
            keys = window * (1 - window / (2 * sequence))  # that a token sees, on average
            forward = 2 * tokens * keys * heads * (sizes.query_dim + sizes.value_dim)
            if self.measured is not None:
                dims = (sizes.query_dim + sizes.value_dim) / 2
                part = sequence if layout.context == 1 else sequence / (2 * layout.context)  # of the zigzag order
                shares = self.measured.attention_core(self.work.precision, min(window, part), dims)
                forward *= self.slowdown
                return forward / (self.peak * shares[0]), forward / (self.peak * shares[1])
            forward /= self.peak * machine.attention_efficiency
            return forward, BACKWARD_ATTENTION * forward
        rows, calls = sequence // (layout.context * layout.slices), layout.microbatch * heads
        scores = calls * rows * sequence / machine.elementwise_speed
        first = self.product(rows, sizes.query_dim, sequence, calls)
        second = self.product(rows, sequence, sizes.value_dim, calls)
        return first + second + SCORE_BYTES[0] * scores, first + 3 * second + SCORE_BYTES[1] * scores

    def _elementwise(self, shape: LayerShape, tokens: int, held: float, t: int) -> tuple[float, float]:
        """Return the bytes that elementwise kernels read and write, forward and backward."""
        size, h = self.bytes, shape.hidden
        forward, backward = 2 * size * shape.norms * held * h, 4 * size * shape.norms * held * h
        if shape.kind in ("embedding", "positions"):
            return 2 * size * held * h, 4 * size * held * h
        if shape.kind == "head":
            vocabulary = tokens * math.ceil(shape.products[0].outputs / t)
            return LOGIT_BYTES[0] * vocabulary, LOGIT_BYTES[1] * vocabulary
        if shape.kind != "block":
            return forward, backward
        assert shape.attention is not None and shape.feedforward is not None
        mask = float(shape.dropout)
        forward += 2 * (3 * size + mask) * held * h  # residual and bias, added to the output of each branch
        backward += 2 * (2 * size + mask) * held * h
        sizes = shape.attention
        heads = (sizes.heads * sizes.query_dim + sizes.kv_heads * (sizes.query_dim + sizes.value_dim)) / t
        rotated = (1 + bool(sizes.rotated) + sizes.norms) * size * tokens * heads  # rotated, normalized, transposed
        forward, backward = forward + rotated, backward + rotated
        mlp: Feedforward = shape.feedforward
        each, width = _mlp_sizes(shape, mlp, tokens / t, held)
        forward += (3 if mlp.gated else 2) * size * width
        backward += (4.5 if mlp.gated else 3) * size * width
        if mlp.experts:  # tokens are put in the order of their experts and back
            moved = 4 * size * each * mlp.per_token * h
            forward, backward = forward + moved, backward + moved
        return forward, backward

    def _context(self, sizes: Attention, layout: ParallelLayout, attention: tuple[float, float]) -> tuple[float, float]:
        """Return the seconds of ring attention's messages that the core of attention does not hide."""
        c = layout.context
        if c == 1:
            return 0.0, 0.0
        heads = math.ceil(sizes.kv_heads / layout.tensor)
        whole = self.bytes * layout.microbatch * self.work.sequence * heads * (sizes.query_dim + sizes.value_dim)
        once = reduce_scatter(whole, RankGroup(c, layout.tensor), self.machine)
        call = self._call("context")
        if self.on_cores:
            return once + call, 2 * (once + call)
        return max(0.0, once - attention[0]) + call, max(0.0, 2 * once - attention[1]) + 2 * call

    def _expert(self, shape: LayerShape, layout: ParallelLayout, held: float) -> tuple[float, float]:
        """Return the seconds of the all-to-alls of a mixture of experts."""
        assert shape.feedforward is not None
        sent = self.bytes * held * shape.feedforward.per_token * shape.hidden
        call = self._call("expert") if layout.expert > 1 else 0.0
        both = 2 * (all_to_all(sent, RankGroup(layout.expert, layout.tensor), self.machine) + call)
        return both, both

    def _call(self, axis: str) -> float:
        """Return the measured seconds of a collective within a layer beyond those in a loop of its own."""
        return self.measured.calls.get(axis, 0.0) if self.measured is not None else 0.0

    # ------------------------------------------------------------------------------------------------- a step

    def step(self, layout: ParallelLayout) -> StepTime:
        """Return the time of a step.

        Raises:
            ValueError: data x microbatch does not divide the batch, or the schedule does not exist for the layout.
        """
        if layout.changes != UNCHANGED and (self.work.speeds or self.on_cores):
            raise ValueError(
                f"{layout} has options of the schedule, which are not planned for ranks of several speeds (--speeds), "
                "or for ranks that share cores. Leave them out."
            )
        if self.on_cores:
            kinds = self._step_on_cores(layout)
        else:
            ranks, kinds = self._pipeline(layout)
            self._finish(layout, ranks, kinds)
            if self.measured is not None:
                kinds["overhead"] += self.measured.step
        return StepTime(sum(kinds.values()), {kind: kinds.get(kind, 0.0) for kind in KINDS})

    def passes(self, layout: ParallelLayout) -> float:
        """Return the seconds of a step up to its last backward pass: of all ZeRO stages, if the layout's is 0 or 1."""
        if self.on_cores:
            assert self.measured is not None
            m, each = layout.microbatches(self.work.batch), layout.chunks * sum(self.measured.microbatch)
            ranks = [m * (rank.busy + each) for rank in self._stages(layout)[1]]
            return max(*ranks, sum(ranks) * layout.gpus / layout.pipe / self.speed_of_all(layout.gpus))
        return sum(self._pipeline(layout)[1].values())

    def least(self, layout: ParallelLayout) -> float:
        """Return a lower bound of ``passes``, without a simulation, of a layout with options of its schedule.

        The last rank waits for the first forward pass to come through the other ranks, and in 1f1b and interleaved
        these wait for its last gradient; slices take equally long. A rank that recomputes runs that share of its
        forward passes again, at best while it would wait. Of stp it is 0.99 of the paper's formula.
        """
        m, ranks = layout.microbatches(self.work.batch), self._rank_times(layout, _zigzag(layout))
        costs = self._costs(layout, max(ranks, key=lambda rank: rank.busy))
        each, f = costs.products, costs.forward
        recipe = RECIPES[layout.schedule]
        if recipe.idle_in_pairs is not None:
            return m * each + 0.99 * recipe.idle_in_pairs(f, costs.inputs, costs.weights, costs.reduce, layout.pipe)
        whole = recipe.closed is not None and not recipe.split
        waits = (layout.pipe - 1) * (each if whole else f) / (layout.chunks * layout.slices)
        again = max(0.0, layout.recompute_ops - 1 / m) * f
        return max(m * each + 0.99 * waits, m * (each + again))  # the slices' lengths are rounded

    def copies(self, layout: ParallelLayout) -> float:
        """Return the seconds of the copies that a layout offloads and reloads, over those of the passes."""
        ranks = self._rank_times(layout, _zigzag(layout))
        costs = self._costs(layout, max(ranks, key=lambda rank: rank.busy))
        return layout.offload_activations * 2 * costs.copy / costs.products

    def speed_of_all(self, processes: int) -> float:
        """Return the most that processes on shared cores compute together, over what one computes alone."""
        assert self.measured is not None
        if processes not in self._speeds:
            self._speeds[processes] = max(count * self.measured.speed(count) for count in range(1, processes + 1))
        return self._speeds[processes]

    def _pipeline(self, layout: ParallelLayout) -> tuple[list[_RankTime], dict[str, float]]:
        """Return the times of the pipe ranks, and the busiest one's seconds by kind up to the last backward pass."""
        m, p = layout.microbatches(self.work.batch), layout.pipe
        ranks = self._rank_times(layout, _zigzag(layout))
        busiest = max(ranks, key=lambda rank: rank.busy)
        kinds = {kind: m * layout.slices * value for kind, value in busiest.kinds.items()}
        if self.work.speeds:
            kinds["bubble"] = max(0.0, self._makespan(layout, m, ranks) - m * busiest.busy)
        elif layout.changes != UNCHANGED or (p > 1 and layout.hides_collectives):
            self._change(layout, m, busiest, kinds)
        elif p > 1:
            if self._closed(layout, m, busiest):
                kinds["bubble"] = sum(rank.idle(layout) * rank.count for rank in ranks) - busiest.idle(layout)
            else:
                kinds["bubble"] = max(0.0, self._makespan(layout, m, [busiest]) - m * busiest.busy)
        return ranks, kinds

    def _change(self, layout: ParallelLayout, m: int, rank: _RankTime, kinds: dict[str, float]) -> None:
        """Set the times of a step by kind that the options of a layout's schedule change: all by simulation."""
        costs = self._costs(layout, rank)
        whole, idle = self._makespan_of(layout, m, costs)
        if layout.hides_collectives:
            waits = kinds["tensor"] + kinds["expert"]
            shown = whole - idle - (sum(kinds.values()) - waits)  # what a busy rank takes beyond its products
            for kind in ("tensor", "expert"):
                kinds[kind] *= max(0.0, shown) / waits if waits else 0.0
        if layout.recompute_ops:
            made = self.schedule(layout, costs)
            again = max(sum(op.kind == "C" for op in order) for order in made.orders) / made.microbatches / made.chunks
            kinds["recompute"] += m * again * rank.forward
        kinds["bubble"] = whole - sum(kinds.values())
        if kinds["bubble"] < 0:  # a long schedule recomputes a smaller share than the short one
            kinds["recompute"], kinds["bubble"] = max(0.0, kinds["recompute"] + kinds["bubble"]), 0.0

    def _costs(self, layout: ParallelLayout, rank: _RankTime) -> _PassCosts:
        """Return the costs of a rank's passes for a schedule with options, of whole microbatches."""
        n, t, moved = layout.slices, self.types, 0.0
        tokens = layout.microbatch * self.work.sequence / layout.context
        if layout.offload_activations:
            kept = (
                count * self.memory.layer_activations(shape, tokens, self.work.sequence, layout)
                for count, shape in zip(rank.counts, t, strict=True)
                if count
            )
            moved = sum(kept) / self.machine.host_bandwidth
        ahead = back = sent = shown = again = 0.0  # collectives of the forward pass, of input and of weight gradients
        for kind, count in enumerate(rank.counts if layout.hides_collectives else ()):
            if not count:
                continue
            time = self.layer(kind, layout)
            axes = (layout.microbatch, layout.context, layout.tensor, layout.expert)
            more = self._shown.get((kind, *axes, bool(layout.sequence_parallel), n), (0.0, 0.0))
            ahead, back = ahead + count * time.tensor[0], back + count * time.tensor[1]
            sent += count * time.expert[0]
            shown, again = shown + count * more[0], again + count * more[1]
        split = RECIPES[layout.schedule].split
        attention = rank.kinds["attention"] / (rank.forward + rank.inputs)
        return _PassCosts(
            n * (rank.forward - ahead - sent),
            n * (rank.inputs - back - split * shown - sent),
            n * (rank.weights - split * again),
            moved,
            n * (ahead + back + shown) / 2,
            n * sent,
            min(1.0, attention) if n > 1 else 0.0,
        )

    def schedule_options(self, layout: ParallelLayout) -> ScheduleOptions:
        """Return the options of a layout's schedule, as a run has them."""
        if layout.changes == UNCHANGED:
            return ScheduleOptions(name=layout.schedule, chunks=layout.chunks)
        ranks = self._rank_times(layout, _zigzag(layout))
        return self._options(layout, self._costs(layout, max(ranks, key=lambda rank: rank.busy)))

    def _options(self, layout: ParallelLayout, costs: _PassCosts) -> ScheduleOptions:
        """Return ``schedule_options`` for the costs of the busiest rank, which stand in it in units of its forward."""
        given: dict[str, Any] = {"name": layout.schedule, "chunks": layout.chunks}
        unit = costs.forward
        if layout.slices > 1:
            lengths = equal_cost_slices(layout.slices, costs.attention)
            given["slices"] = tuple(round(each, 4) for each in lengths)
        if layout.pairs or layout.recompute_ops or layout.offload_activations:
            given["costs"] = (1.0, *(_short(each / unit) for each in (costs.inputs, costs.weights)))
        if layout.pairs:
            given["pairs"] = _short((costs.reduce + costs.exchange) / unit)
        if layout.recompute_ops:
            given["recompute"] = layout.recompute_ops
        if layout.offload_activations:
            share, copy = layout.offload_activations, _short(costs.copy / unit)
            given["offload"] = OffloadActivations(device="cpu", pin_memory=True, fraction=share, copy_time=copy)
        return ScheduleOptions(**given)

    def schedule(
        self, layout: ParallelLayout, costs: _PassCosts | None = None, microbatches: int | None = None
    ) -> Schedule:
        """Return the schedule that a run of a layout makes.

        Args:
            layout: the layout.
            costs: of its busiest rank; None: they are computed.
            microbatches: microbatches of a step; None: as many of the layout's as have the same peaks.
        """
        options = self.schedule_options(layout) if costs is None else self._options(layout, costs)
        m = layout.microbatches(self.work.batch)
        m = (m if m <= 5 * layout.pipe else 4 * layout.pipe + m % layout.pipe) if microbatches is None else microbatches
        key = (layout.pipe, m, layout.recompute == "none", options)
        found = self._schedules.get(key)
        if found is None:
            plain = named_schedule(layout.schedule, layout.pipe, m, layout.chunks, options.slices)
            found = self._schedules[key] = with_passes(plain, options, layout.recompute != "none")[0]
        return found

    def _makespan_of(self, layout: ParallelLayout, m: int, costs: _PassCosts) -> tuple[float, float]:
        """Return the seconds of a schedule with options by simulation, and those in which its busiest rank is idle."""

        def simulated(microbatches: int) -> Timeline:
            key = (layout.schedule, layout.pipe, layout.chunks, microbatches, layout.changes, costs)
            if key not in self._timelines:
                self._timelines[key] = timeline_of(self.schedule(layout, costs, microbatches), costs.costs)
            return self._timelines[key]

        def idle(microbatches: int) -> float:
            return simulated(microbatches).bubble * simulated(microbatches).makespan

        p = layout.pipe
        return _extrapolated(lambda count: simulated(count).makespan, m, p), _extrapolated(idle, m, p)

    def _closed(self, layout: ParallelLayout, m: int, busiest: _RankTime) -> bool:
        """Return True if the schedule has a closed form, and it holds."""
        closed = RECIPES[layout.schedule].closed
        return closed is not None and closed.holds(layout.pipe, m, busiest.forward, busiest.inputs, busiest.weights)

    def _makespan(self, layout: ParallelLayout, m: int, ranks: Sequence[_RankTime]) -> float:
        """Return the seconds of a schedule by simulation, of these ranks or of ranks that are all like this one."""
        p, v = layout.pipe, layout.chunks
        if len(ranks) == 1:
            costs = Costs(ranks[0].forward, ranks[0].inputs, ranks[0].weights)
        else:
            forward, inputs, weights = zip(*((each.forward, each.inputs, each.weights) for each in ranks), strict=True)
            costs = Costs(forward, inputs, weights)

        def makespan(microbatches: int) -> float:
            key = (layout.schedule, p, v, microbatches, costs)
            if key not in self._simulated:
                schedule = named_schedule(layout.schedule, p, microbatches, v)
                self._simulated[key] = timeline_of(schedule, costs).makespan
            return self._simulated[key]

        return _extrapolated(makespan, m, p)

    def _rank_times(self, layout: ParallelLayout, zigzag: bool) -> list[_RankTime]:
        """Return the times of a microbatch on each kind of pipe rank."""
        key = (
            *(layout.pipe, layout.data, layout.context, layout.tensor, layout.expert, layout.microbatch),
            *(layout.chunks, layout.schedule, layout.recompute, layout.sequence_parallel, layout.slices),
        )
        if self._last[0] != key:
            self._last = (key, self._times_without_zero(layout, zigzag))
        ranks = self._last[1]
        return ranks if layout.zero < 2 else [self._every_pass(rank, layout) for rank in ranks]

    def _times_without_zero(self, layout: ParallelLayout, zigzag: bool) -> list[_RankTime]:
        """Return ``_rank_times`` of ZeRO stages 0 and 1."""
        v, p = layout.chunks, layout.pipe
        hop = 0.0
        if p > 1 and not RECIPES[layout.schedule].sends_ahead:
            tokens = layout.microbatch * self.work.sequence / (layout.context * layout.slices)
            shards = layout.tensor if layout.sequence_parallel else 1
            size = self.bytes * tokens * self.work.config.hidden_size / shards
            stride = layout.data * layout.context * layout.tensor
            hop = v * self.machine.message_overhead
            hop += 0.0 if self.machine.overlap_messages else v * message(size, stride, self.machine)
        each_type = list(zip(*(self._passes(kind, layout) for kind in range(len(self.types))), strict=True))
        found = []
        for place, (counts, ranks) in enumerate(self.ranks(p, v, zigzag)):
            speed = self.work.speeds[place] if self.work.speeds else 1.0
            time = PassTime(*(sum(map(mul, counts, seconds)) / speed for seconds in each_type))
            kinds = time.kinds() | {"recompute": time.recompute, "pipe": 2 * hop}
            inputs = time.inputs + time.recompute + hop
            found.append(_RankTime(ranks, counts, time.forward + hop, inputs, time.weights, kinds))
        return found

    def _stages(self, layout: ParallelLayout) -> tuple[list[PassTime], list[PassTime]]:
        """Return the times of each stage and of each pipe rank."""
        placement = RECIPES[layout.schedule].place(layout.pipe, layout.chunks)
        cuts = self.memory.cuts(len(placement))
        stages = [
            PassTime.total(self._passes(kind, layout) for kind in self.kinds[start:stop])
            for start, stop in pairwise(cuts[: len(placement) + 1])
        ]
        ranks = [
            PassTime.total(time for time, home in zip(stages, placement, strict=True) if home == rank)
            for rank in range(layout.pipe)
        ]
        return stages, ranks

    def _step_on_cores(self, layout: ParallelLayout) -> dict[str, float]:
        """Return the seconds of a step by kind, on ranks that share the cores of one machine."""
        measured, m, p, machine = self.measured, layout.microbatches(self.work.batch), layout.pipe, self.machine
        assert measured is not None
        schedule = named_schedule(layout.schedule, p, m, layout.chunks)
        cuts, ranks = self.memory.cuts(len(schedule.placement)), range(p)
        stages, times = self._stages(layout)
        counts = [[0] * len(self.types) for _ in ranks]
        one = [tuple(int(kind == each) for each in range(len(self.types))) for kind in range(len(self.types))]
        work = []
        kinds = [time.kinds(m) for time in times]
        for stage, rank in enumerate(schedule.placement):
            gather = scatter = 0.0
            call = self._call("data") if layout.data * layout.context > 1 else 0.0
            for kind in self.kinds[cuts[stage] : cuts[stage + 1]]:
                counts[rank][kind] += 1
                for count, group in self._held(one[kind], layout) if layout.zero >= 2 else ():  # a bucket a layer
                    gather += call + all_gather(count * self.bytes, group, machine) if layout.zero == 3 else 0.0
                    scatter += call + reduce_scatter(count * max(4, self.bytes), group, machine)
            time = stages[stage]
            forward = time.forward + (measured.microbatch[0] + gather)
            inputs = time.inputs + (time.recompute + measured.microbatch[1] + gather + scatter)
            work.append(StageWork(forward, inputs, time.weights))
            rank_kinds = kinds[rank]
            rank_kinds["data"] = rank_kinds.get("data", 0.0) + m * (2 * gather + scatter)
            rank_kinds["recompute"] = rank_kinds.get("recompute", 0.0) + m * time.recompute
            rank_kinds["overhead"] += m * sum(measured.microbatch)
        ends, after = [0.0] * p, [(0.0, 0.0)] * p  # behind a rank's last op; behind all ranks' (data, optimizer)
        for rank in ranks:
            published = stepped = 0.0
            for count, group in self._held(tuple(counts[rank]), layout):
                wide = count * max(4, self.bytes)
                if layout.zero < 2:
                    ends[rank] += (reduce_scatter if layout.zero else all_reduce)(wide, group, machine)
                published += all_gather(count * self.bytes, group, machine) if layout.zero in (1, 2) else 0.0
                share = max(1.0, count / (group.size if layout.zero else 1))
                stepped += share * interpolated(measured.optimizer, (share,))[0]
                if layout.gpus > 1:  # the norm of all gradients
                    stepped += measured.kernel("fp32", "square", share)[0]
            after[rank] = published, stepped
        ties = [
            (rank, kind) for rank in ranks for kind, each in enumerate(self.types) if counts[rank][kind] and each.tie
        ]
        for rank, kind in ties if len({rank for rank, _ in ties}) > 1 else ():
            numel = self.types[kind].parameters / layout.tensor
            ends[rank] += all_reduce(numel * max(4, self.bytes), RankGroup(2, layout.gpus // p), machine)
        tokens = layout.microbatch * self.work.sequence / layout.context
        hidden = self.bytes * tokens * self.work.config.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
        latency = message(0.0, 1, machine) if p > 1 else 0.0
        moved = message(hidden, 1, machine) - latency if p > 1 else 0.0
        busiest = max(ranks, key=lambda rank: ends[rank] + sum(kinds[rank].values()))
        found = kinds[busiest]
        found["data"] += ends[busiest]

        def total(speed: Callable[[int], float]) -> float:
            return makespan(schedule, work, ends, latency, moved, layout.gpus // p, speed)

        alone = total(lambda processes: 1.0)
        hops = [pair for pair in pairwise(schedule.placement) if pair[0] != pair[1]]
        found["pipe"] = 2 * m * moved * sum(pair.count(busiest) for pair in hops)
        found["bubble"] = max(0.0, alone - sum(found.values()))
        shared = total(measured.speed)
        data, optimizer = max(after, key=sum)
        others = 1 / measured.speed(layout.gpus) - 1
        found["cores"] = shared - alone + (data + optimizer) * others
        found["data"], found["optimizer"] = found["data"] + data, optimizer
        found["overhead"] += measured.step
        return found

    def _passes(self, kind: int, layout: ParallelLayout) -> PassTime:
        """Return the times of a layer of type ``self.types[kind]``, as the layout's schedule runs its passes."""
        split = RECIPES[layout.schedule].split and not self.on_cores
        axes = (layout.microbatch, layout.context, layout.tensor, layout.expert)
        key = (kind, *axes, bool(layout.sequence_parallel), layout.slices)
        found = self._totals.get((*key, layout.recompute, split))
        if found is None:
            time, recompute = self.layer(kind, layout), 0.0
            if self.types[kind].kind == "block":
                again = {"none": 0.0, "selective": time.attention[0], "full": time.forward, "mlp": self._mlp[key]}
                recompute = again[layout.recompute]
            inputs, weights = self._shown.get(key, (0.0, 0.0)) if split else (0.0, 0.0)
            parts = {name: sum(part) for name, part in zip(LayerTime._fields, time, strict=True)}
            parts["tensor"] += inputs + weights
            found = PassTime(time.forward, time.backward + inputs, time.products[2] + weights, recompute, **parts)
            self._totals[*key, layout.recompute, split] = found
        return found

    def ranks(self, p: int, v: int, zigzag: bool = False) -> list[tuple[tuple[int, ...], int]]:
        """Return the kinds of pipe ranks: the number of layers of each type, and how many ranks have them."""
        key = (p, v, zigzag)
        found = self._ranks.get(key)
        if found is None:
            stages = self.memory.cuts(p * v)
            each = []
            for rank in range(p):
                mine = [c * p + (p - 1 - rank if zigzag and c % 2 else rank) for c in range(v)]
                held = Counter(kind for s in mine for kind in self.kinds[stages[s] : stages[s + 1]])
                each.append(tuple(held[kind] for kind in range(len(self.types))))
            found = self._ranks[key] = (
                [(counts, 1) for counts in each] if self.work.speeds else [*Counter(each).items()]
            )
        return found

    def parameters(self, kind: int, tensor: int, expert: int) -> tuple[float, float]:
        """Return the parameters of a layer that a rank holds: replicated over the experts' axis, and not."""
        key = (kind, tensor, expert)
        found = self._parameters.get(key)
        if found is None:
            shared = own = 0.0
            for weight in self.types[kind].weights:
                count = weight.numel / (tensor if weight.shards_over(tensor) else 1)
                if weight.expert_dim is None:
                    shared += count
                else:
                    own += count / expert
            found = self._parameters[key] = (shared, own)
        return found

    def layer_costs(self, layout: ParallelLayout) -> LayerCosts:
        """Return the costs of each layer for whole microbatches, from which a cut is searched (pipe/cuts.py)."""
        layout = replace(layout, slices=1)
        tokens, replicas = layout.microbatch * self.work.sequence / layout.context, layout.data * layout.context
        output = self.bytes * tokens * self.work.config.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
        stride = replicas * layout.tensor
        latency, seconds = (message(size, stride, self.machine) for size in (0.0, output))
        layers = []
        for kind, shape in zip(self.kinds, self.work.layers, strict=True):
            time = self._passes(kind, layout)
            states = sum(
                model_states(count, shards, layout.zero, self.work.precision).total
                for count, shards in zip(
                    self.parameters(kind, layout.tensor, layout.expert),
                    (replicas, replicas // layout.expert),
                    strict=True,
                )
            )
            kept = self.memory.layer_activations(shape, tokens, self.work.sequence, layout)
            inputs = time.inputs + time.recompute
            layers.append(LayerCost(time.forward, inputs, time.weights, states, kept, output, shape.name))
        return LayerCosts(
            tuple(layers),
            latency + self.machine.message_overhead,
            max(0.0, seconds - latency) / output,
            self.work.speeds,
        )

    def _held(self, counts: tuple[int, ...], layout: ParallelLayout) -> list[tuple[float, RankGroup]]:
        """Return the parameters that a rank holds before ZeRO shards them, with the group of their replicas."""
        t, replicas = layout.tensor, layout.data * layout.context
        key = (counts, t, replicas, layout.expert)
        if key in self._groups:
            return self._groups[key]
        shared = own = 0.0
        for kind, count in enumerate(counts):
            if count:
                a, b = self.parameters(kind, t, layout.expert)
                shared, own = shared + count * a, own + count * b
        held = [(shared, RankGroup(replicas, t))]
        held += [(own, RankGroup(replicas // layout.expert, t * layout.expert))] * (own > 0)
        self._groups[key] = held
        return held

    def _scatter(self, size: float, group: RankGroup) -> float:
        """Return the seconds of a reduce-scatter or an all-gather."""
        key = (size, group)
        found = self._scatters.get(key)
        if found is None:
            found = self._scatters[key] = reduce_scatter(size, group, self.machine)
        return found

    def _every_pass(self, rank: _RankTime, layout: ParallelLayout) -> _RankTime:
        """Return a rank's times with those collectives of ZeRO stages 2 and 3 that the passes do not hide."""
        gather = scatter = 0.0
        for count, group in self._held(rank.counts, layout):
            gather += self._scatter(count * self.bytes, group) if layout.zero == 3 else 0.0
            scatter += self._scatter(count * max(4, self.bytes), group)
        forward = max(rank.forward, gather)
        shown = max(0.0, gather + scatter - rank.inputs - rank.weights)
        kinds = {**rank.kinds, "data": forward - rank.forward + shown}
        return _RankTime(rank.count, rank.counts, forward, rank.inputs + shown, rank.weights, kinds)

    def _finish(self, layout: ParallelLayout, ranks: Sequence[_RankTime], kinds: dict[str, float]) -> None:
        """Add what follows the last backward pass: gradients, optimizer, weights. The slowest rank counts."""
        machine, wide = self.machine, max(4, self.bytes)
        data = optimizer = offload = 0.0
        for rank in ranks:
            gradients = weights = step = moved = 0.0
            for count, group in self._held(rank.counts, layout):
                share = count / (group.size if layout.zero else 1)
                if layout.zero == 0:
                    gradients += all_reduce(count * wide, group, machine)
                elif layout.zero == 1:
                    gradients += self._scatter(count * wide, group)
                weights += self._scatter(count * self.bytes, group) if layout.zero in (1, 2) else 0.0
                if layout.offload:
                    moved += share * ((wide + self.bytes) / machine.host_bandwidth)
                    step += share * ADAM_BYTES / machine.host_memory_bandwidth
                else:
                    step += share * ADAM_BYTES / machine.elementwise_speed
            if machine.overlap_gradients and (layout.pipe == 1 or machine.overlap_pipelined_gradients):
                gradients = max(0.0, gradients - (rank.inputs + rank.weights))
            if machine.overlap_weights:
                weights = max(0.0, weights - rank.forward)
            if gradients + weights + step + moved > data + optimizer + offload:
                data, optimizer, offload = gradients + weights, step, moved
        kinds["data"] = kinds.get("data", 0.0) + data
        kinds["optimizer"], kinds["offload"] = optimizer, offload


@dataclass
class _RankTime:
    """Seconds of one microbatch on a pipe rank, all its chunks together; ``count`` ranks have them."""

    count: int
    counts: tuple[int, ...]
    forward: float
    inputs: float
    weights: float
    kinds: dict[str, float]

    @property
    def busy(self) -> float:
        """Seconds of a microbatch."""
        return self.forward + self.inputs + self.weights

    def idle(self, layout: ParallelLayout) -> float:
        """Return the seconds that other ranks wait for this one at the start and the end of a step."""
        closed = RECIPES[layout.schedule].closed
        assert closed is not None
        return closed.idle(self.forward, self.inputs, self.weights, layout.chunks)


class _PassCosts(NamedTuple):
    """Seconds of a whole microbatch on a rank whose schedule has options; the collectives only where they may hide."""

    forward: float
    inputs: float
    weights: float
    copy: float  # of its activations to the host, or back
    reduce: float  # collectives of the tensor axis in a forward pass or an input gradient
    exchange: float  # of the expert axis
    attention: float  # share of causal attention, for slices

    @property
    def products(self) -> float:
        """Seconds of all passes without the collectives that may hide."""
        return self.forward + self.inputs + self.weights

    @property
    def costs(self) -> Costs:
        """The costs for a simulation."""
        passes = self[:3]
        return Costs(*passes, O=self.copy, R=self.copy, AR=self.reduce, A2A=self.exchange, attention=self.attention)


def _zigzag(layout: ParallelLayout) -> bool:
    """Return True if the stages of a layout lie on the ranks in a V."""
    return layout.chunks > 1 and RECIPES[layout.schedule].place(2, 2) == (0, 1, 1, 0)


def _extrapolated(makespan: Callable[[int], float], m: int, pipe: int) -> float:
    """Return the makespan of m microbatches: a long schedule repeats, so much for each further microbatch.

    Args:
        makespan: number of microbatches -> makespan.
        m, pipe: microbatches, and ranks of the pipe axis.
    """
    short = 3 * pipe + m % pipe
    if m <= short + 2 * pipe:
        return makespan(m)
    return makespan(short) + (m - short) / pipe * (makespan(short + pipe) - makespan(short))


def _short(value: float) -> float:
    """Return a number with four digits, as a training file has it."""
    return float(f"{value:.4g}")


def _mlp_sizes(shape: LayerShape, mlp: Feedforward, sharded: float, held: float) -> tuple[float, float]:
    """Return the tokens of a rank's MLP, and the elements of its activation.

    Args:
        shape, mlp: the block, and its MLP.
        sharded: tokens if the tensor axis shards the MLP's width.
        held: tokens otherwise.
    """
    split = any(each.weight.startswith("mlp.") and each.sharding != "none" for each in shape.products)
    tokens = sharded if split else held
    return tokens, tokens * (mlp.width * (mlp.per_token or 1) + mlp.shared)


def utilization(work: Work, layout: ParallelLayout, seconds: float) -> Mapping[str, float]:
    """Return TFLOP/s of the model on each rank, and their share of the peak."""
    speed = work.model_flops / seconds / layout.gpus
    return {"tflops_per_gpu": speed / 1e12, "mfu": speed / work.machine.peak_of(work.precision)}
