"""Layout: a frozen record of where each element of a parameter lies on the tensor axis and on the expert axis.

It is the only attribute that triax sets on parameters. It decides the slice taken at initialization, the group over
which the gradient is reduced, which rank counts it in the gradient norm, its ZeRO range, and its box in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .comm.axis import Axis
from .ranges import shard_shape, split

# Not plain `layout`: every tensor has that attribute already (torch.strided), and it cannot be written.
_ATTRIBUTE = "triax_layout"


class Box(NamedTuple):
    """N-d slice of an unsharded tensor, and the slice of this rank's shard that has the same elements.

    Attributes:
        whole: one slice for each dim of the unsharded tensor.
        local: one slice for each dim of this rank's shard.
    """

    whole: tuple[slice, ...]
    local: tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """Layout of one parameter.

    >>> triax.Layout(shape=(8, 4), shard_dim=0).boxes(rank=1, size=2)
    [Box(whole=(slice(4, 8, None), slice(0, 4, None)), local=(slice(0, 4, None), slice(0, 4, None)))]

    Attributes:
        shape: the unsharded shape of the parameter.
        name: the whole-model name, e.g. ``layers.7.attention.qkv.weight``, on every stage; empty until a
            ``PipelineModule`` places the layer.
        shard_dim: the dim that the tensor axis shards; None: every tensor-parallel rank holds the whole parameter.
        parts: lengths of fused parts along ``shard_dim`` (q, k and v, for instance), each sharded on its own; None
            is one part. A length need not be a multiple of the tensor axis's size: see ``ranges.split``.
        unit: rows along ``shard_dim`` that stay together, e.g. those of a head. It divides each part (or the dim).
            Shards hold whole units, unevenly if their number is not a multiple of the tensor axis's size.
        partial: the parameter is replicated over the tensor axis, but each rank computes a partial sum of its
            gradient (norms on sequence shards): the gradients are summed over the tensor axis.
        tie: the key of the group of tied weights to which the parameter belongs, or None.
        expert_dim: the dim that the expert axis shards, which counts a layer's experts; None: it shards none.
    """

    shape: tuple[int, ...]
    name: str = ""
    shard_dim: int | None = None
    parts: tuple[int, ...] | None = None
    partial: bool = False
    tie: str | None = None
    unit: int = 1
    expert_dim: int | None = None

    def __post_init__(self) -> None:
        if self.expert_dim is not None and (
            not 0 <= self.expert_dim < len(self.shape) or self.expert_dim == self.shard_dim
        ):
            raise ValueError(
                f"expert_dim={self.expert_dim} must be a dim of the shape {self.shape} other than "
                f"shard_dim={self.shard_dim}: give the dim that counts the experts"
            )
        if self.shard_dim is None:
            if self.parts is not None or self.unit != 1:
                raise ValueError(
                    f"parts={self.parts} and unit={self.unit} describe the dim that the tensor axis shards, but "
                    "shard_dim is None: give shard_dim too"
                )
        elif not 0 <= self.shard_dim < len(self.shape):
            dims = len(self.shape)
            raise ValueError(f"shard_dim={self.shard_dim} is no dim of the shape {self.shape}: give 0 to {dims - 1}")
        elif self.parts is not None and sum(self.parts) != self.shape[self.shard_dim]:
            raise ValueError(
                f"parts={self.parts} add up to {sum(self.parts)}, but dim {self.shard_dim} of the shape {self.shape} "
                f"is {self.shape[self.shard_dim]} long: give parts with this sum"
            )
        elif self.unit < 1 or any(length % self.unit for length in self._parts):
            raise ValueError(
                f"unit={self.unit} does not divide {' and '.join(map(str, self._parts))}, the length of dim "
                f"{self.shard_dim} of the shape {self.shape} or of its parts: give unit a divisor, for instance the "
                "rows of one head"
            )
        if self.partial and self.shard_dim is not None:
            raise ValueError(
                f"partial=True is for replicated parameters, and shard_dim={self.shard_dim} shards this one: leave one "
                "of them out"
            )

    @property
    def sharded(self) -> bool:
        """True if the tensor axis shards the parameter."""
        return self.shard_dim is not None

    @property
    def replicas(self) -> str:
        """The name of the grid's axis over which the parameter is replicated, and its gradient summed."""
        return "data_context" if self.expert_dim is None else "expert_data"

    def boxes(self, rank: int, size: int, expert: tuple[int, int] = (0, 1)) -> list[Box]:
        """Return the boxes of the unsharded tensor that one rank holds, one for each fused part.

        Args:
            rank: rank on the tensor axis.
            size: size of the tensor axis.
            expert: rank on, and size of, the expert axis.
        """
        everything = tuple(slice(0, length) for length in self.shape)
        outer, local = everything, everything
        if self.expert_dim is not None:
            start, stop = split(self.shape[self.expert_dim], expert[1], expert[0])
            outer = _at(everything, self.expert_dim, slice(start, stop))
            local = _at(everything, self.expert_dim, slice(0, stop - start))
        if self.shard_dim is None:
            return [Box(outer, local)]
        boxes = []
        part_start = local_start = 0
        for length in self._parts:
            start, stop = split(length, size, rank, self.unit)
            span = slice(part_start + start, part_start + stop)
            here = slice(local_start, local_start + stop - start)
            boxes.append(Box(_at(outer, self.shard_dim, span), _at(local, self.shard_dim, here)))
            part_start += length
            local_start += stop - start
        return boxes

    def local_shape(self, rank: int, size: int, expert: tuple[int, int] = (0, 1)) -> tuple[int, ...]:
        """Return the shape of the shard of the rank that ``boxes`` describes."""
        return shard_shape(self.shape, rank, size, self.shard_dim, self.parts, self.unit, expert, self.expert_dim)

    def lengths(self, rank: int, size: int) -> list[int]:
        """Return the length of each fused part in the shard of rank ``rank`` on a tensor axis of size ``size``."""
        return [stop - start for start, stop in (split(n, size, rank, self.unit) for n in self._parts)]

    def shard(self, whole: Tensor, rank: int, size: int, expert: tuple[int, int] = (0, 1)) -> Tensor:
        """Return the shard of the rank that ``boxes`` describes.

        It is a view of the unsharded tensor if it is one box, else a copy.
        """
        if tuple(whole.shape) != self.shape:
            raise ValueError(
                f"the tensor to shard has the shape {tuple(whole.shape)}, but {self.name or 'the parameter'} has the "
                f"shape {self.shape}: give the unsharded tensor"
            )
        if self.shard_dim is None and self.expert_dim is None:
            return whole
        pieces = [whole[box.whole] for box in self.boxes(rank, size, expert)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.shard_dim or 0)

    def gather(self, axis: Axis, mine: Tensor, expert: Axis | None = None) -> Tensor:
        """All-gather the shards and return the unsharded tensor on every rank. Collective over the axes that shard it.

        Args:
            axis: the tensor axis.
            mine: this rank's shard.
            expert: the expert axis, if it may shard the tensor.
        """
        if self.expert_dim is not None and expert is not None and expert.size > 1:
            start, stop = split(self.shape[self.expert_dim], expert.size, expert.rank)
            experts = self._of_experts(stop - start).gather(axis, mine)
            return Layout(self.shape, shard_dim=self.expert_dim).gather(expert, experts)
        if not self.sharded or axis.size == 1:
            return mine
        shapes = [torch.Size(self.local_shape(rank, axis.size)) for rank in range(axis.size)]
        most = max(shape.numel() for shape in shapes)  # parts may be uneven: each is padded to the largest
        padded = F.pad(mine.reshape(-1), [0, most - mine.numel()]).contiguous()
        gathered = padded.new_empty(axis.size * most)
        axis.all_gather(gathered, padded)
        flats = gathered.split(most)
        return self.assemble([flat[: shape.numel()].view(shape) for flat, shape in zip(flats, shapes, strict=True)])

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the unsharded tensor, given the shards of all ranks of the tensor axis: the inverse of ``shard``."""
        if self.shard_dim is None:
            return shards[0]
        assembled = shards[0].new_empty(self.shape)
        for rank, shard in enumerate(shards):
            for box in self.boxes(rank, len(shards)):
                assembled[box.whole] = shard[box.local]
        return assembled

    def assemble_experts(self, shards: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the unsharded tensor, given for each rank of the expert axis the shards of its tensor-parallel ranks.

        Only the first list is used if the expert axis does not shard the parameter.
        """
        if self.expert_dim is None:
            return self.assemble(shards[0])
        lengths = [row[0].shape[self.expert_dim] for row in shards]
        rows = [self._of_experts(length).assemble(row) for length, row in zip(lengths, shards, strict=True)]
        return Layout(self.shape, shard_dim=self.expert_dim).assemble(rows)

    def layers(self, tensor: Tensor) -> list[Tensor]:
        """Return views of the layers in a tensor of this layout: one of each expert, or the tensor itself."""
        return [tensor] if self.expert_dim is None else list(tensor.unbind(self.expert_dim))

    def map_layers(self, function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        """Return the tensor after a function of each layer. Experts (E, rows, columns) are given to it as one stack."""
        if self.expert_dim is None or (self.expert_dim == 0 and tensor.dim() == 3):
            return function(tensor)
        return torch.stack([function(layer) for layer in self.layers(tensor)], self.expert_dim)

    @property
    def layer_dims(self) -> int:
        """Number of dims of a layer: that of experts counts layers."""
        return len(self.shape) - (self.expert_dim is not None)

    def _of_experts(self, length: int) -> Layout:
        """Return the layout of a part of the parameter with ``length`` experts, over the tensor axis alone."""
        assert self.expert_dim is not None
        shape = (*self.shape[: self.expert_dim], length, *self.shape[self.expert_dim + 1 :])
        return replace(self, shape=shape, expert_dim=None)

    @property
    def _parts(self) -> tuple[int, ...]:
        assert self.shard_dim is not None
        return self.parts or (self.shape[self.shard_dim],)


class FlatRange(NamedTuple):
    """Range of a parameter, with its values: elements ``start`` to ``stop`` of this rank's flattened shard."""

    name: str
    layout: Layout
    start: int
    stop: int
    value: Tensor  # (stop - start,): a view


def layout_of(parameter: Tensor) -> Layout:
    """Return a parameter's layout. A parameter without one is taken to be replicated over the tensor axis."""
    layout = getattr(parameter, _ATTRIBUTE, None)
    return layout if isinstance(layout, Layout) else Layout(tuple(parameter.shape))


def require_plain(named: Iterable[tuple[str, Tensor]], of: str) -> None:
    """Refuse tensors of lazy modules, which have no shape yet, and DTensors, which another library has sharded.

    Args:
        named: parameters and buffers, with their names.
        of: what they are part of, for the message.

    Raises:
        ValueError: there is such a tensor.
    """
    for name, tensor in named:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} of {of} has no shape yet: give the sizes of its layer (nn.Linear in place of nn.LazyLinear), "
                "or run the module once on a sample before"
            )
        if type(tensor).__name__ == "DTensor":  # the class itself is imported by nothing else here
            raise ValueError(
                f"{name} of {of} is a DTensor, which another library has sharded: give the module before "
                "distribute_tensor, parallelize_module or fully_shard; triax shards its plain tensors"
            )


def set_layout(parameter: nn.Parameter, layout: Layout) -> None:
    """Store a layout as an attribute of a parameter."""
    setattr(parameter, _ATTRIBUTE, layout)


def rename(parameter: nn.Parameter, name: str, tie: str | None) -> None:
    """Set the whole-model name and the tie in a parameter's layout."""
    set_layout(parameter, replace(layout_of(parameter), name=name, tie=tie))


def _at(slices: tuple[slice, ...], dim: int, span: slice) -> tuple[slice, ...]:
    return (*slices[:dim], span, *slices[dim + 1 :])
