"""The microbatches of one step: fetched where they are read, agreed upon everywhere before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..grid.nest import map_tensors
from ..pipe.executor import Microbatch
from ..pipe.module import PipelineModule
from ..pipe.nest import flatten


class Feed:
    """Fetches microbatches on the ranks that read them, and tells the others what they need to know of them.

    Floating-point inputs take ``dtype``, where the model computes in another than theirs; labels stay as they are.
    Only the first stage reads inputs and only the last one labels: iterators of other ranks are not touched.
    """

    def __init__(self, module: PipelineModule, dtype: torch.dtype | None = None) -> None:
        self._module, self._grid, self._dtype = module, module.grid, dtype
        self._kinds: dict[Any, int] = {}
        self._frozen: tuple[bool, ...] | None = None

    def fetch(self, data_iter: Iterator[Any] | None, count: int) -> tuple[list[Microbatch], bool]:
        """The next ``count`` microbatches, and whether what stages exchange may look different from before.

        Raises:
            RuntimeError: on every rank alike, if any rank's iterator ended early, failed, or gave what is no
                pair ``(inputs, labels)``.
        """
        module, grid = self._module, self._grid
        pairs: list[tuple[Any, Any]] = []
        problem = None
        if module.is_first or module.is_last:
            pairs, problem = self._next(data_iter, count)
        frozen = tuple(parameter.requires_grad for parameter in module.parameters())
        changed = frozen != self._frozen
        self._frozen = frozen
        flags = torch.tensor([problem is not None, changed], dtype=torch.int64)
        grid.world.all_reduce(flags, op="max")
        if flags[0]:
            reasons = [reason for reason in grid.world.all_gather_object(problem) if reason]
            raise RuntimeError(reasons[0])

        # Microbatches that look alike have one number; ranks behind the first stage learn it, and their length.
        facts = torch.zeros(count, 2, dtype=torch.int64)
        if module.is_first:
            for row, (inputs, _) in zip(facts, pairs, strict=True):
                tensors, schema = flatten(inputs)
                row[0] = self._kinds.setdefault(schema, len(self._kinds))
                row[1] = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
        grid.pipe.broadcast(facts, source=module.placement[0])

        microbatches, first = [], grid.data.rank * int(facts[:, 1].sum())
        for index, (kind, length) in enumerate(facts.tolist()):
            inputs, labels = pairs[index] if pairs else (None, None)
            microbatches.append(
                Microbatch(
                    self._move(inputs, self._dtype) if module.is_first else None,
                    self._move(labels) if module.is_last else None,
                    kind,
                    range(first, first + length),
                )
            )
            first += length
        return microbatches, bool(flags[1])

    def _next(self, data_iter: Iterator[Any] | None, count: int) -> tuple[list[tuple[Any, Any]], str | None]:
        """The next pairs, and what went wrong, if anything did: the other ranks must hear of it first."""
        who = self._grid.describe()
        if not hasattr(data_iter, "__next__"):
            what = "None" if data_iter is None else f"a {type(data_iter).__name__}"
            return [], f"{who}: data_iter is {what}, not an iterator: pass iter(loader) once and keep it"
        assert data_iter is not None
        pairs: list[tuple[Any, Any]] = []
        for index in range(count):
            try:
                item = next(data_iter)
            except StopIteration:
                return [], (
                    f"{who}: the data ended after {index} of the {count} microbatches of this step: give whole steps, "
                    "or an iterator that starts again"
                )
            except Exception as error:
                return [], f"{who}: the data iterator failed at microbatch {index}: {type(error).__name__}: {error}"
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                return [], f"{who}: a microbatch is a pair (inputs, labels), not {_describe(item)}"
            try:
                flatten(item[0])
            except TypeError as error:
                return [], f"{who}: the inputs of microbatch {index}: {error}"
            pairs.append((item[0], item[1]))
        return pairs, None

    def _move(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            wanted = dtype if tensor.is_floating_point() else None
            return tensor.to(self._grid.device, wanted, non_blocking=True)

        return map_tensors(move, value)


def _describe(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of {len(item)}"
    return f"a {type(item).__name__}"
