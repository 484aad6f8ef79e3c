"""Microbatches of one step: read on the first stage, and for labels on the last one; agreed on before anything runs."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from itertools import count as numbers
from typing import Any, NamedTuple

import torch

from ..base.errors import AgreedError
from ..base.nest import map_tensors
from ..grid import Grid
from ..grid.agreement.agreement import begin_call, difference
from .fields import FieldMessages, Fields, MicrobatchItem, item_of
from .microbatch import Microbatch
from .module import PipelineModule
from .schema import flatten

_MAX_FIELD_SCHEMAS = 256  # that are kept; a text or a number in the labels makes a new one

_SAME_SAMPLES = "the ranks of a tensor or context group share each sample, so they must take the same samples"


class Format(NamedTuple):
    """Format of a microbatch, which all ranks must know.

    Attributes:
        schema: number of the schema of its inputs.
        samples: number of samples.
        fields: number of the schema of the fields that are sent.
        tokens: number of tokens of a sample; 0 if the inputs are no sequences.
    """

    schema: int = 0
    samples: int = 0
    fields: int = 0
    tokens: int = 0


class MicrobatchFeed:
    """Reader of microbatches on the ranks that need data. It sends the schemas and sizes to the other ranks.

    Only the first stage reads inputs and only the last one labels: iterators of other ranks are not touched. With
    ``sends_labels`` the last stage does not read, and the first one sends it the labels. Floating-point inputs are cast
    to ``dtype``; labels stay as they are.

    Schemas and sizes are sent only when they change. A step like the last one costs one small collective.

    Args:
        module: the model, whose stages say which ranks read.
        dtype: dtype of the model's computation. If None, inputs are not cast.
        sends_labels: the ranks of the first stage send the labels to those of the last stage.

    Attributes:
        shift: number of samples of the step that other grids have before this one's.
        misplaced: iterator that failed on some ranks of its replica only, so that these may be at different samples.
    """

    def __init__(self, module: PipelineModule, dtype: torch.dtype | None = None, sends_labels: bool = False) -> None:
        self._module, self._dtype = module, dtype
        last = module.placement[-1]
        self._receives_labels = sends_labels and module.is_last and not module.is_first
        needs = {rank: list(module.taken(rank)) for rank in range(module.grid.pipe.size)}
        self._taken = {name for names in needs.values() for name in names}
        if sends_labels and last != module.placement[0] and "labels" not in needs[last]:
            needs[last].append("labels")
        self._messages = FieldMessages(module, needs)
        self._reads_labels = module.is_last and not self._receives_labels
        self._uses_labels = self._reads_labels or (module.is_first and "labels" in self._messages.names)
        self._schemas: dict[Any, int] = {}  # number of each schema that was read here
        self._field_schemas: dict[Any, int] = {}  # the same of the fields that are sent
        self._field_numbers = numbers()
        self._formats: list[Format] = []  # of the last microbatches
        self.shift = 0
        self.misplaced: Iterator[Any] | None = None
        self._failed: list[int] = []  # microbatches of the last step for which ``next`` failed
        self._first_sample = 0  # number of this replica's first sample in the global batch
        self._parameters = list(module.parameters())
        self._trained: list[bool] = []

    @property
    def reads(self) -> bool:
        """True if this rank reads data."""
        return self._module.is_first or self._reads_labels

    def wait_sent(self) -> None:
        """Wait for this rank's sends of the last ``fetch``; call it when the microbatches have run."""
        self._messages.wait_sent()

    def abandon(self) -> None:
        """Drop all messages after a failure."""
        self._messages.abandon()

    def fetch(
        self, grid: Grid, data_iter: Iterator[Any] | None, count: int, call: str, problem: str | None = None
    ) -> tuple[list[Microbatch], bool]:
        """Return the next microbatches, and True if the set of trained parameters has changed on any rank.

        After such a change the messages between stages may have other schemas, because only needed gradients are sent.

        Args:
            grid: grid whose ranks run the microbatches.
            data_iter: iterator of pairs ``(inputs, labels)``, or of dicts with ``labels``.
            count: number of microbatches.
            call: name of the call that all ranks make.
            problem: reason why this rank cannot run the microbatches, or None if it can.

        Raises:
            AgreedError: on every rank, if any rank has a problem, or its iterator ended early, failed, or returned
                something else than a pair or a dict.
            RuntimeError: on every rank, if a rank makes another call, or runs another number of microbatches.
        """
        items: list[MicrobatchItem] = []
        cause: BaseException | None = None
        formats = [Format()] * count
        self._failed = []
        if self.reads:
            try:
                items, formats = self._read(data_iter, count)
            except _BadData as error:
                if problem is None:
                    problem, cause = f"{grid.describe()}: {error}", error.__cause__
        call = f"{call} of {count} microbatches"
        new_formats, new_trained = self._agree(grid, data_iter, formats, call, problem, cause)
        if new_formats:
            self._share_formats(grid, items, formats)
        return self._microbatches(items), new_trained

    def _read(self, data_iter: Iterator[Any] | None, count: int) -> tuple[list[MicrobatchItem], list[Format]]:
        """Read the next microbatches on this rank; returns them and their formats.

        After an error it reads the rest of the step too, as the other ranks do. So the next inputs and labels, which
        different ranks read, are of the same samples.

        Raises:
            _BadData: a microbatch is missing or not valid. The other ranks must be told before this one raises.
        """
        if not hasattr(data_iter, "__next__"):
            self._failed = [-1]
            what = "None" if data_iter is None else f"a {type(data_iter).__name__}"
            raise _BadData(f"data_iter is {what}, not an iterator: pass iter(loader) once and keep it")
        assert data_iter is not None
        if data_iter is self.misplaced:
            raise _BadData(
                "this data iterator failed in an earlier call on some ranks only, so that ranks which share samples "
                "may be at different ones: give every rank a new iterator"
            )
        items: list[MicrobatchItem] = []
        formats: list[Format] = []
        errors: list[_BadData] = []
        for index in range(count):
            try:
                value = next(data_iter)
            except StopIteration:
                text = (
                    f"the data ended after {index} of the {count} microbatches of this step: give whole steps, "
                    "or an iterator that starts again, such as triax.RepeatingLoader(loader)"
                )
                errors.append(_BadData(text))
                self._failed.append(index)
                break
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                at = traceback.extract_tb(error.__traceback__)[-1]
                where = f"microbatch {index}, in line {at.lineno} of {at.filename}"
                errors.append(_BadData(f"the data iterator failed at {where}: {what}"))
                errors[-1].__cause__ = error
                self._failed.append(index)
                continue
            try:
                item, format_ = self._item(index, value)
            except _BadData as error:
                errors.append(error)
            else:
                items.append(item)
                formats.append(format_)
        if errors:
            raise errors[0]
        return items, formats

    def _item(self, index: int, value: Any) -> tuple[MicrobatchItem, Format]:
        """Return a microbatch that was read, and its format.

        Raises:
            _BadData: it is not a pair or a dict, or lacks a field.
        """
        if isinstance(value, Mapping) and getattr(self._module.loss_fn, "next_tokens", False):
            raise _BadData(
                f"microbatch {index} is a dict, whose labels are taken to be the token ids themselves, as "
                f"transformers' collators make them, but {type(self._module.loss_fn).__name__} needs the token "
                "that follows each position: use loss_fn=triax.CausalLMLoss(grid=grid), which shifts them, or give "
                "pairs (ids, next tokens)"
            )
        try:
            item = item_of(value, self._taken)
        except TypeError as error:
            raise _BadData(f"microbatch {index} {error}") from error
        try:
            tensors, schema = flatten(item.inputs, sent=False)
        except TypeError as error:
            raise _BadData(f"the inputs of microbatch {index}: {error}") from error
        samples = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
        fields = self._field_schema_id(index, item) if self._messages.names and self._module.is_first else 0
        tokens = tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else 0
        return item, Format(self._schemas.setdefault(schema, len(self._schemas)), samples, fields, tokens)

    def _field_schema_id(self, index: int, item: MicrobatchItem) -> int:
        """Return the id of the schema of the fields that a microbatch sends.

        Raises:
            _BadData: the microbatch does not have a field, or it cannot be sent.
        """
        try:
            _, schema = flatten({name: item.field(name) for name in self._messages.names})
        except (KeyError, TypeError) as error:
            raise _BadData(f"the fields of microbatch {index} that layers or the loss take: {error.args[0]}") from error
        if len(self._field_schemas) > _MAX_FIELD_SCHEMAS:
            self._field_schemas.clear()  # their numbers are not used again
        if schema not in self._field_schemas:
            self._field_schemas[schema] = next(self._field_numbers)
        return self._field_schemas[schema]

    def _agree(
        self,
        grid: Grid,
        data_iter: Iterator[Any] | None,
        formats: list[Format],
        call: str,
        problem: str | None,
        cause: BaseException | None,
    ) -> tuple[bool, bool]:
        """Find out whether formats, or the set of trained parameters, changed since the last step. Collective.

        Args:
            grid: grid whose ranks run the microbatches.
            data_iter: the iterator that was read.
            formats: this rank's formats.
            call: the call that all ranks make.
            problem: reason why this rank cannot run the microbatches, or None.
            cause: the error behind it, if there is one.

        Returns:
            (formats changed on any rank, trained parameters changed on any rank), equal on all ranks.

        Raises:
            AgreedError: on every rank, if any rank has a problem.
        """
        trained = [parameter.requires_grad for parameter in self._parameters]
        new_formats = len(formats) != len(self._formats) or (self._module.is_first and formats != self._formats)
        failed, new_trained = problem is not None, trained != self._trained
        failed, new_trained, new_formats = map(bool, begin_call(grid, call, [failed, new_trained, new_formats]))
        if failed:
            told = grid.world.all_gather_json((problem, grid.data.rank, self._failed if self.reads else None))
            places = [place for _, replica, place in told if replica == grid.data.rank and place is not None]
            if any(place != places[0] for place in places):
                self.misplaced = data_iter
            raise AgreedError(next(reason for reason, *_ in told if reason)) from cause
        self._trained = trained
        return new_formats, new_trained

    def _share_formats(self, grid: Grid, items: list[MicrobatchItem], formats: list[Format]) -> None:
        """Send the formats of the first stage to all stages, and the numbers of samples to all replicas. Collective.

        Raises:
            AgreedError: on every rank: the ranks of a tensor or context group read microbatches of different shapes.
        """
        module = self._module
        table = torch.tensor(formats, dtype=torch.int64)
        if grid.tensor.size * grid.context.size > 1:
            facts = {
                f"the shape of the {what} of microbatch {index}": shapes(value)
                for index, item in enumerate(items)
                for what, value, read in zip(("inputs", "labels"), item[:2], (module.is_first, self._uses_labels))
                if read
            }
            for axis in (grid.tensor, grid.context):
                if axis.size > 1 and (reason := difference(grid, axis, facts, grid.world)) is not None:
                    self._formats, self._trained = [], []  # this step's changes are told again in the next one
                    raise AgreedError(f"{reason}: {_SAME_SAMPLES}")
        grid.pipe.broadcast(table, source=module.placement[0])
        self._formats = [Format(*row) for row in table.tolist()]
        self._messages.forget_schemas()
        # Replicas may have different numbers of samples: count the samples of the replicas before this one.
        samples = torch.zeros(grid.data.size, dtype=torch.int64)
        samples[grid.data.rank] = sum(format_.samples for format_ in self._formats)
        grid.data.all_reduce(samples)
        before = int(samples[: grid.data.rank].sum())
        # Replicas outside this grid (under local updates) count as large as this one.
        self._first_sample = before + (grid.replica - grid.data.rank) * int(samples.sum())

    def _microbatches(self, items: list[MicrobatchItem]) -> list[Microbatch]:
        """Return the microbatches, on this rank's device. Sends the fields that other ranks need, or receives them."""
        moved, read = list[tuple[Any, Any]](), list[Fields]()
        names = self._messages.names if self._module.is_first else ()
        for item in items or [MicrobatchItem(None, None)] * len(self._formats):
            inputs = self._move(item.inputs, self._dtype) if self._module.is_first else None
            labels = self._move(item.labels) if self._uses_labels else None
            entries = {name: self._move(item.entries[name], self._dtype) for name in names if name in item.entries}
            needed = {name: MicrobatchItem(inputs, labels, entries).field(name) for name in names}
            moved.append((inputs, labels if self._reads_labels else None))
            read.append(map_tensors(torch.Tensor.detach, needed))
        fields = self._messages.exchange(read, [format_.fields for format_ in self._formats])
        microbatches, first = [], self._first_sample + self.shift
        for format_, (inputs, labels), own in zip(self._formats, moved, fields, strict=True):
            labels, samples = own["labels"] if self._receives_labels else labels, range(first, first + format_.samples)
            microbatches.append(Microbatch(inputs, labels, format_.schema, samples, own, format_.tokens))
            first = samples.stop
        return microbatches

    def _move(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        """Move a nest's tensors to this rank's device, and cast those of floating point to ``dtype``, if given."""
        device = self._module.grid.device
        return map_tensors(
            lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True), value
        )


def require_equal_shapes(grid: Grid, inputs: Any) -> None:
    """Check that all ranks of the tensor group and of the context group got inputs of equal shapes.

    Plain modules need it, because no ``MicrobatchFeed`` reads their data. Collective over both axes.

    Raises:
        ValueError: on the ranks of the group.
    """
    for axis in (grid.tensor, grid.context):
        if axis.size == 1:
            continue
        reason = difference(grid, axis, {"the shape of the inputs": shapes(inputs)}, axis)
        if reason is not None:
            raise ValueError(f"{reason}: {_SAME_SAMPLES}")


def shapes(value: Any) -> str:
    """Return the shapes and dtypes of a nest of tensors as text; for another object, its type."""
    try:
        return str(flatten(value, sent=False)[1])
    except TypeError:
        return f"a {type(value).__name__}"


class _BadData(Exception):
    """Error of a data iterator that ended early, failed, or did not return a pair (inputs, labels) or a dict."""
