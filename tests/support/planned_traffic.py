"""Bytes that each pipe rank sends in a step, by axis, as ``engine.traffic_report()`` counts them. No torch.

| axis | bytes of a rank in a step, with t tensor-parallel ranks, one = bytes of a microbatch's hidden states |
|---|---|
| pipe | of each boundary to another rank, ``one`` for each microbatch and direction; tied weights' gradients; labels |
| data | ``formulas.zero_traffic`` of its buckets |
| tensor | of each block, (t-1)/t x 10 x one under sequence parallelism, else 8 x one; embedding, head and loss |

>>> from triax.models.config import GPTConfig
>>> config = GPTConfig(vocab_size=512, hidden_size=256, num_hidden_layers=8, num_attention_heads=4)
>>> sent_bytes(config, ParallelLayout(pipe=2), batch=8, sequence=128, precision="fp32")[0]["pipe"] == 8 * 4 * 128 * 256
True
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from triax.base.formulas import zero_traffic
from triax.models.config import TransformerConfig
from triax.pipe.schedules.registry import RECIPES, named_schedule
from triax.plugins.plan.layer_shapes import LayerShape
from triax.plugins.plan.memory import ModelMemory
from triax.plugins.plan.parallel_layout import ParallelLayout
from triax.plugins.plan.state_memory import StateOptions

_ALIGN = 16  # elements; as ``zero.flat`` pads each replica's shard


def sent_bytes(
    config: TransformerConfig,
    layout: ParallelLayout,
    batch: int,
    sequence: int,
    precision: str = "bf16",
    tensor_rank: int | None = None,
    labels_sent: bool = False,
) -> list[dict[str, float]]:
    """Return for each pipe rank the bytes that it sends in a step: axis -> bytes, without numbers that ranks agree on.

    Args:
        config: the model.
        layout: the layout.
        batch: sequences of a step, over all replicas.
        sequence: tokens of a sequence.
        precision: as for ``StateOptions``.
        tensor_rank: rank on the tensor axis; None: the last one, whose shards are the largest.
        labels_sent: the first stage's ranks send the labels to the last stage.

    Raises:
        ValueError: the layout has a context or an expert axis, whose bytes are not counted here.
    """
    if layout.context > 1 or layout.expert > 1:
        raise ValueError(
            f"bytes of context={layout.context} and expert={layout.expert} are not counted. Give a layout with pipe, "
            "data and tensor only."
        )
    if config.tie_word_embeddings and layout.pipe > 1 and RECIPES[layout.schedule].place(2, layout.chunks)[-1] == 0:
        raise ValueError(
            f"{layout.schedule} has the first and the last stage on one rank. The bytes of tied embeddings on one rank "
            "are not counted: give a model with tie_word_embeddings=False."
        )
    options = StateOptions(precision=precision)
    memory = ModelMemory(config, options=options)
    m = layout.microbatches(batch)
    schedule = named_schedule(layout.schedule, layout.pipe, m, layout.chunks)
    place, cuts = schedule.placement, memory.cuts(len(schedule.placement))
    t = layout.tensor
    one = options.size * layout.microbatch * sequence * config.hidden_size
    message = one / (t if layout.sequence_parallel else 1)
    found: list[dict[str, float]] = [{"pipe": 0.0, "data": 0.0, "tensor": 0.0} for _ in range(layout.pipe)]
    for a, b in pairwise(place):
        if a != b:
            found[a]["pipe"] += m * message
            found[b]["pipe"] += m * message
    if labels_sent and place[0] != place[-1]:
        found[place[0]]["pipe"] += m * 8 * layout.microbatch * sequence
    for stage, rank in enumerate(place):
        if t > 1:
            for layer in memory.layers[cuts[stage] : cuts[stage + 1]]:
                found[rank]["tensor"] += m * _tensor(layer, layout, one, layout.microbatch * sequence, options)
    for rank, buckets in enumerate(memory.buckets(layout, tensor_rank)):
        order = schedule.orders[rank]
        passes = Counter(op.stage for op in order if op.kind in "BI")
        count = max(passes.values())
        partial = 0
        if layout.sequence_parallel:
            mine = [
                layer for stage, at in enumerate(place) if at == rank for layer in range(cuts[stage], cuts[stage + 1])
            ]
            weights = [weight for layer in mine for weight in memory.layers[layer].weights]
            partial = sum(weight.numel for weight in weights if not weight.shards_over(t))
        every = layout.zero >= 2 and layout.data > 1
        found[rank]["tensor"] += partial * options.wide * 2 * (t - 1) / t * (count if every else 1)
        for shape, number in buckets.items():
            whole = _padded(shape.numel, layout.data)
            if shape.tied and layout.pipe > 1:
                found[rank]["pipe"] += number * options.wide * whole  # 2 (n-1)/n of them, between two ranks
            volume = zero_traffic(
                layout.zero,
                options.size * whole,
                options.wide * whole,
                count,
                partitioned=layout.zero == 3 and not shape.persistent,
                reduces_every_backward=layout.zero >= 2 and not shape.tied,
            )
            found[rank]["data"] += number * volume * (layout.data - 1) / layout.data
        if layout.zero == 3 and place[0] == rank:
            # No gradient tells that the first layer's backward pass is over: it stays gathered for the next pass.
            kept = sum(a.stage == b.stage == 0 and a.kind in "BI" for a, b in pairwise(order))
            first = _padded(sum(weight.numel for weight in memory.layers[0].weights) // t, layout.data)
            saved = kept * first
            if layout.pipe == 1 and memory.layers[0].tie:  # gathered for the head too, and then the norm before it
                saved -= 2 * m * first + _padded(memory.layers[-2].parameters, layout.data)
            found[rank]["data"] -= saved * options.size * (layout.data - 1) / layout.data
    return found


def _tensor(layer: LayerShape, layout: ParallelLayout, one: float, tokens: int, options: StateOptions) -> float:
    """Return the bytes that a layer sends over the tensor axis for a microbatch, forward and backward."""
    share, gathered = (layout.tensor - 1) / layout.tensor, bool(layout.sequence_parallel)
    if layer.kind == "embedding":
        return share * one * 2
    if layer.kind == "head":
        return share * (one * (3 if gathered else 2) + 2 * 3 * max(4, options.size) * tokens)
    if layer.kind != "block":
        return 0.0
    forward = 4 * share * one
    last = (1 if gathered else 2) * share * one  # nothing needs the layer's output again
    again = forward - last if layout.recompute == "full" else 0.0
    return forward + again + (6 if gathered else 4) * share * one


def _padded(numel: int, replicas: int) -> int:
    step = replicas * _ALIGN
    return -(-numel // step) * step
