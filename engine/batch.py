"""The microbatches of one step: fetched where they are read, agreed upon everywhere before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..grid.nest import map_tensors
from ..pipe.executor import Microbatch
from ..pipe.module import PipelineModule
from ..pipe.nest import flatten
from .alike import look, unlike


class AgreedError(RuntimeError):
    """Every rank raises it alike, before anything was changed: the engine can go on."""


class Feed:
    """Fetches microbatches on the ranks that read them, and tells the others what they need to know of them.

    Floating-point inputs take ``dtype``, where the model computes in another than theirs; labels stay as they are.
    Only the first stage reads inputs and only the last one labels: iterators of other ranks are not touched.

    What microbatches look like travels when it changes. A step like the last one costs one small collective.

    Attributes:
        grid: whose ranks agree.
    """

    def __init__(self, module: PipelineModule, dtype: torch.dtype | None = None) -> None:
        self._module, self.grid, self._dtype = module, module.grid, dtype
        self._kinds: dict[Any, int] = {}
        self._facts: list[list[int]] = []  # of each of the last microbatches: its kind, and its length
        self._first = 0  # the number of this replica's first sample in the global batch
        self._parameters = list(module.parameters())
        self._frozen: list[bool] = []

    @property
    def reads(self) -> bool:
        """Whether this rank reads data."""
        return self._module.is_first or self._module.is_last

    def fetch(
        self, data_iter: Iterator[Any] | None, count: int, problem: str | None = None
    ) -> tuple[list[Microbatch], bool]:
        """The next ``count`` microbatches, and whether what stages exchange may look different from before.

        Args:
            data_iter: of microbatches.
            count: how many.
            problem: what keeps this rank from running them, if anything does.

        Raises:
            AgreedError: on every rank alike, if any rank has a problem, or its iterator ended early, failed, or
                gave what is no pair ``(inputs, labels)``.
        """
        module, grid = self._module, self.grid
        pairs: list[tuple[Any, Any]] = []
        facts = [[0, 0]] * count
        if problem is None and self.reads:
            try:
                pairs, facts = self._next(data_iter, count)
            except _BadData as error:
                problem = f"{grid.describe()}: {error}"
        frozen = [parameter.requires_grad for parameter in self._parameters]
        news = len(facts) != len(self._facts) or (module.is_first and facts != self._facts)
        failed, changed = problem is not None, frozen != self._frozen
        if grid.size > 1:
            flags = torch.tensor([failed, changed, news], dtype=torch.int64)
            grid.world.all_reduce(flags, op="max")
            failed, changed, news = map(bool, flags.tolist())
        if failed:
            reasons = [reason for reason in grid.world.all_gather_object(problem) if reason]
            raise AgreedError(reasons[0])
        self._frozen = frozen
        if news:
            # Microbatches that look alike have one number; ranks behind the first stage learn it, and their length.
            table = torch.tensor(facts, dtype=torch.int64)
            if grid.tensor.size > 1:
                looks = [
                    look(f"{what} of microbatch {index}:", value)
                    for index, pair in enumerate(pairs)
                    for what, value, read in zip(("inputs", "labels"), pair, (module.is_first, module.is_last))
                    if read
                ]
                if (reason := unlike(grid, looks, grid.world)) is not None:
                    self._facts = []
                    raise AgreedError(reason)
            grid.pipe.broadcast(table, source=module.placement[0])
            self._facts = table.tolist()
            # Replicas need not have the same number of samples: count those of the ones before.
            samples = torch.zeros(grid.data.size, dtype=torch.int64)
            samples[grid.data.rank] = table[:, 1].sum()
            grid.data.all_reduce(samples)
            # (Of replicas that do not talk at every step nothing is known: they count as being as large.)
            self._first = int(samples[: grid.data.rank].sum()) + (grid.replica - grid.data.rank) * int(samples.sum())

        microbatches, first = [], self._first
        for index, (kind, length) in enumerate(self._facts):
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
        return microbatches, changed

    def _next(self, data_iter: Iterator[Any] | None, count: int) -> tuple[list[tuple[Any, Any]], list[list[int]]]:
        """The next pairs; of each its kind and length.

        Raises:
            _BadData: there are none; the other ranks must hear of it before anybody stops.
        """
        if not hasattr(data_iter, "__next__"):
            what = "None" if data_iter is None else f"a {type(data_iter).__name__}"
            raise _BadData(f"data_iter is {what}, not an iterator: pass iter(loader) once and keep it")
        assert data_iter is not None
        pairs: list[tuple[Any, Any]] = []
        facts: list[list[int]] = []
        for index in range(count):
            try:
                item = next(data_iter)
            except StopIteration:
                raise _BadData(
                    f"the data ended after {index} of the {count} microbatches of this step: give whole steps, "
                    "or an iterator that starts again"
                ) from None
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise _BadData(f"the data iterator failed at microbatch {index}: {what}") from error
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise _BadData(f"a microbatch is a pair (inputs, labels), not {_describe(item)}")
            try:
                tensors, schema = flatten(item[0])
            except TypeError as error:
                raise _BadData(f"the inputs of microbatch {index}: {error}") from error
            pairs.append((item[0], item[1]))
            length = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
            facts.append([self._kinds.setdefault(schema, len(self._kinds)), length])
        return pairs, facts

    def _move(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            wanted = dtype if tensor.is_floating_point() else None
            return tensor.to(self.grid.device, wanted, non_blocking=True)

        return map_tensors(move, value)


class _BadData(Exception):
    """An iterator did not give what a step needs."""


def _describe(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of {len(item)}"
    return f"a {type(item).__name__}"
