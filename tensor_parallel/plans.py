"""Styles in which ``parallelize`` shards a module: a plan maps patterns of module names to them.

The plans for Hugging Face's families are in ``models/huggingface/families.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # families of models are read without torch
    from torch import nn


@dataclass(frozen=True)
class Column:
    """Style of a linear layer whose outputs are sharded (column-parallel).

    Attributes:
        parts: lengths of the layers that are fused along the outputs, or the number of equal ones. Each of these
            layers is sharded separately.
        unit: number of consecutive outputs that stay on one rank; for attention heads, the head's width.
        gather_output: return all outputs on every rank.
        group: name of a group of sibling layers that always get the same input. The outputs of the whole group are
            computed when its first layer is called, so that the input's gradient is reduced once. They have one graph:
            add up losses of different layers before ``backward``, or give ``retain_graph=True``.
    """

    parts: tuple[int, ...] | int | None = None
    unit: int = 1
    gather_output: bool = False
    group: str = ""

    @property
    def unit_of_heads(self) -> int:
        """Number of outputs of a head, if the style has heads; else 1."""
        return self.unit


@dataclass(frozen=True)
class Row:
    """Style of a linear layer whose inputs are sharded (row-parallel).

    Attributes:
        unit: number of consecutive inputs that stay on one rank, equal to ``unit`` of the ``Column`` layer in front.
    """

    unit: int = 1


@dataclass(frozen=True)
class Vocab:
    """Style of an embedding whose rows (the vocabulary) are sharded.

    Attributes:
        scale: factor of the vectors, for an embedding whose own ``forward`` multiplies by it (Gemma's).
    """

    scale: float = 1.0


@dataclass(frozen=True)
class KeyValue:
    """Style of the key or value projection of grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

    The projection is sharded if the tensor axis divides ``kv_heads``. Otherwise it is replicated, and each rank
    computes only the key/value heads that its query heads use. The attention module's ``num_key_value_heads`` and
    ``num_key_value_groups``, where it has them, are set to the number of key/value heads that this rank computes, and
    of query heads per key/value head.

    Attributes:
        heads: number of query heads. Each group of ``heads / kv_heads`` query heads shares a key/value head.
        kv_heads: number of key/value heads.
        head_dim: number of outputs per head.
        group: group of sibling layers, as in ``Column``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    group: str = ""

    @property
    def unit_of_heads(self) -> int:
        """Number of outputs of a head."""
        return self.head_dim


@dataclass(frozen=True)
class FusedHeads:
    """Style of one linear layer for queries, keys and values, of grouped queries or not.

    The heads of keys and values are sharded, which the tensor axis must divide unless there are as many as query heads.
    A single one (multi-query attention) is computed on every rank; the weight is then replicated.

    Attributes:
        heads, kv_heads, head_dim: as in ``KeyValue``.
        grouped: the outputs are, for each key/value head, those of its query heads, its key and its value; False: all
            queries, all keys, all values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    grouped: bool = True


@dataclass(frozen=True)
class OnAllHeads:
    """Style of an RMSNorm over all heads together, such as OLMo-2's norms of queries and keys.

    Its weight is sharded by heads, and the ranks add up their mean squares. The tensor axis must divide the heads,
    unless they are as many as the query heads.

    Attributes:
        heads: number of heads.
        head_dim: width of each.
    """

    heads: int
    head_dim: int


@dataclass(frozen=True)
class OnEachHead:
    """Style of a layer with a weight (heads, ...) that has a part for each head, such as Command R+'s norms.

    Its weight is sharded by heads, which the tensor axis must divide unless they are as many as the query heads.

    Attributes:
        heads: number of heads.
    """

    heads: int


@dataclass(frozen=True)
class OnHeads:
    """Style of a replicated layer that is applied to each head, such as a norm of the queries.

    Its gradient is summed over the tensor-parallel ranks, because each rank applies the layer only to its own heads.
    """


@dataclass(frozen=True)
class Local:
    """Style of a module with attributes, such as the number of heads, that must be set to this rank's share.

    Attributes:
        attributes: attribute name -> unit in which the number is sharded, e.g. ``{"num_heads": 1, "width": head_dim}``.
            ``"config.num_heads"`` is an attribute of the module's configuration, of which the module gets a copy.
    """

    attributes: Mapping[str, int]


Style = Column | Row | Vocab | KeyValue | FusedHeads | OnAllHeads | OnEachHead | OnHeads | Local


def plan_of_outputs(module: nn.Module, outputs: Mapping[type[nn.Module], Sequence[str]]) -> dict[str, Style]:
    """Return a plan for blocks of which the layers are named whose outputs are summed.

    These layers are row-parallel, all other linear layers of a block column-parallel, and numbers of heads are local.

    Args:
        module: the model.
        outputs: class of the blocks -> ends of the names of these layers, such as ``("attention.out", "mlp.down")``.
    """
    from torch import nn

    plan: dict[str, Style] = {}
    for cls, names in outputs.items():
        for path, block in module.named_modules():
            if type(block) is not cls:
                continue
            for name, layer in block.named_modules():
                full = f"{path}.{name}" if path else name
                if isinstance(layer, nn.Linear):
                    plan[full] = Row() if name.endswith(tuple(names)) else Column()
                heads = {key: 1 for key in ("num_heads", "n_heads", "num_attention_heads") if hasattr(layer, key)}
                if heads and name:
                    plan[full] = Local(heads)
    return plan
