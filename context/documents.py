"""Documents of packed rows: a token attends within its document only.

Whole rows are attended to document by document, without a mask of T x T numbers. Documents of about equal length are
computed in one call: they are padded at the end with keys that, under a causal rule, none of their queries sees. Parts
of rows, of a context axis or of slices, are computed by blocks (block_sparse.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ATTRIBUTE = "triax_documents"  # on the tensor of document numbers, so that all layers cut the documents once
_STEP = 16  # lengths of documents that share a call differ by less than this, or by an eighth


class _DocumentGroup(NamedTuple):
    """N documents that are computed in one call. L: length of the longest."""

    places: Tensor  # int64 (N L,): tokens in the flat rows (B T); behind the end of a document its last token again
    size: int  # L
    held: Tensor | None  # int64 (n,): those of ``places`` that lie in a document; None: all


class _GroupedDocuments(NamedTuple):
    """Groups of all documents, each token in one."""

    groups: list[_DocumentGroup]
    order: Tensor  # int64 (B T,): place of each token of the flat rows in the outputs of the groups, one after another


class Documents:
    """Documents of packed rows, and the groups in which they are computed.

    Args:
        numbers: document number of each token, integers (B, T), on the CPU.

    Raises:
        ValueError: the numbers decrease along a row.
    """

    def __init__(self, numbers: Tensor) -> None:
        if bool((numbers[:, 1:] < numbers[:, :-1]).any()):
            raise ValueError(
                "the numbers of documents decrease along a row. Number the documents of a row 0, 1, 2, ... in order."
            )
        self.numbers = numbers
        self._groups: dict[torch.device, _GroupedDocuments] = {}
        self._masks: dict[torch.device, Tensor] = {}

    def attend(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention within documents, (B, H, T, width).

        Args:
            attend: causal attention of whole rows: called with q, k and v of some documents, (N, heads, L, dim).
            q, k, v: (B, heads, T, dim) of whole rows.
        """
        batch, length = self.numbers.shape
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, heads, dim)
        groups, order = self._on(q.device)
        outputs = []
        for group in groups:
            parts = (x.index_select(0, group.places).unflatten(0, (-1, group.size)).transpose(1, 2) for x in rows)
            y = attend(*parts).transpose(1, 2).flatten(0, 1)  # (N L, H, width)
            outputs.append(y if group.held is None else y.index_select(0, group.held))
        return torch.cat(outputs).index_select(0, order).unflatten(0, (batch, length)).transpose(1, 2)

    @property
    def mask_size(self) -> int:
        """Bytes of ``mask``."""
        return self.numbers.numel() * self.numbers.shape[1]

    def mask(self, device: torch.device) -> Tensor:
        """Return for each pair of tokens whether they are of one document, bool (B, 1, T, T). Kept for a device."""
        if device not in self._masks:
            numbers = self.numbers.to(device)
            self._masks[device] = numbers[:, None, :, None] == numbers[:, None, None, :]
        return self._masks[device]

    def _on(self, device: torch.device) -> _GroupedDocuments:
        if device not in self._groups:
            self._groups[device] = self._grouped(device)
        return self._groups[device]

    def _grouped(self, device: torch.device) -> _GroupedDocuments:
        first = begins(self.numbers).flatten().nonzero()[:, 0]
        lengths = torch.cat([first[1:], first.new_tensor([self.numbers.numel()])]) - first
        step = (2.0 ** (lengths.double().log2().floor() - 3)).long().clamp(min=_STEP)
        rounded = (lengths + step - 1) // step * step
        groups, tokens = [], []
        for chosen in (rounded == size for size in rounded.unique()):
            offsets, ends = torch.arange(int(lengths[chosen].max())), lengths[chosen][:, None]
            places = first[chosen][:, None] + offsets.minimum(ends - 1)
            (held,) = (offsets < ends).flatten().nonzero(as_tuple=True)
            tokens.append(places.flatten()[held])
            some = None if len(held) == places.numel() else held.to(device)
            groups.append(_DocumentGroup(places.flatten().to(device), len(offsets), some))
        return _GroupedDocuments(groups, torch.cat(tokens).argsort().to(device))


def documents_of(numbers: Tensor | None) -> Documents | None:
    """Return the documents of packed rows, or None if each row is one document. Cached on the tensor ``numbers``."""
    if numbers is None:
        return None
    # Tensors of inference mode count no versions, and what is made in it cannot be trained with.
    key = None if numbers.is_inference() else (numbers._version, torch.is_inference_mode_enabled())
    cached: tuple[Any, Documents | None] = getattr(numbers, _ATTRIBUTE, (None, None))
    if key is not None and cached[0] == key:
        return cached[1]
    on_cpu = numbers.detach().cpu()
    documents = None if bool((on_cpu == on_cpu[:, :1]).all()) else Documents(on_cpu)
    setattr(numbers, _ATTRIBUTE, (key, documents))
    return documents


def begins(numbers: Tensor) -> Tensor:
    """Return which tokens are the first of a document: bool (B, T)."""
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return first


def positions_within(numbers: Tensor) -> Tensor:
    """Return each token's position within its document, which starts at 0: int64 (B, T)."""
    places = torch.arange(numbers.shape[1], device=numbers.device).expand(numbers.shape)
    return places - places.masked_fill(~begins(numbers), 0).cummax(dim=1).values
