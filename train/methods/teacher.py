"""A teacher's distribution of the next token, by a second model on the same grid, for ``distill_loss``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...grid.agreement.agreement import agreed
from ...pipe.p2p import channel_between, receive_value
from ...pipe.schema import flatten, unflatten
from .distillation import distill_loss_of
from .remote_teacher import RemoteTeacher

if TYPE_CHECKING:
    from ...engine.pipeline_engine import PipelineEngine

_TAG = 1  # that of the fields of microbatches, which are not sent meanwhile


def with_teacher(
    engine: PipelineEngine,
    teacher: PipelineEngine | RemoteTeacher,
    microbatches: Sequence[tuple[Any, Any]],
    top_k: int | None = None,
) -> list[tuple[Any, Any]]:
    """Return microbatches whose labels have the teacher's distribution at each token. Collective.

    The teacher's stages run forward. The rank of its last stage sends the entries to the rank of the same pipe axis
    that reads the student's labels: none if it is the same rank, as under equal schedules; else for each microbatch

        B T / c x V / t x bytes of the teacher's logits     or, with top_k,     B T / c x k x (4 + 4)  bytes

    from each tensor and context rank, t and c the sizes of these axes, V / t rounded up (8 + 4 for a teacher in
    float64); and a schema of less than 300 bytes. With ``top_k`` each tensor rank sends k such pairs for each token to
    the t - 1 others beforehand. The entries stay on the device, whole for each microbatch: call it for the microbatches
    of one step, or with ``top_k``.

    Args:
        engine: engine of the student, whose ``loss_fn`` is a ``distill_loss``.
        teacher: engine of the teacher on the same grid, without an optimizer, and with the same ``loss_fn`` or another
            ``distill_loss``, which is used to find the logits. Its schedule and ZeRO stage are its own. Or a
            ``RemoteTeacher``, which runs in other processes; remote_teacher.py counts its bytes.
        microbatches: microbatches of this replica, (inputs, labels); labels are a dict with ``labels``. On a rank on
            which neither engine reads data (``batch.labels="sent"``) an empty list.
        top_k: number of words whose log-probabilities, at the student's temperature, are kept; None: the logits of all.

    Returns:
        The microbatches. On the rank that reads the student's labels these have ``teacher`` and, with ``top_k``,
        ``teacher_ids`` of this rank's tokens; and on a tensor axis ``teacher`` alone of this rank's words.

    Raises:
        TypeError: a model has another loss function.
        ValueError: the two differ in grid or vocabulary, ``top_k`` is out of its range, or a rank has no microbatches
            that needs them.
        RuntimeError: a ``RemoteTeacher`` failed or is gone.
    """
    grid = engine.grid
    counts = grid.pipe.all_gather_json(len(microbatches))
    with agreed(grid, None):
        student = distill_loss_of(engine, "the student")
        target = engine.module.placement[0 if engine.options.batch.labels == "sent" else -1]
        if teacher.grid is not grid:
            raise ValueError(
                f"the teacher has its own grid, {teacher.grid}, and the student {grid}: make both models with "
                "grid=engine.grid, the same object, or run the teacher in other processes, with "
                "triax.methods.serve_teacher"
            )
        if not isinstance(teacher, RemoteTeacher):
            loss, source = distill_loss_of(teacher, "the teacher"), teacher.module.placement[-1]
            if loss.vocab_size != student.vocab_size:
                raise ValueError(
                    f"the student has a vocabulary of {student.vocab_size}, the teacher of {loss.vocab_size}: take a "
                    "teacher with the same tokens"
                )
        if top_k is not None and not 1 <= top_k < student.vocab_size:
            raise ValueError(
                f"top_k is {top_k}: give a number from 1 to {student.vocab_size - 1}, less than the vocabulary, or None"
            )
        if counts[target] != max(counts) or not max(counts):
            raise ValueError(
                f"pipe rank {target} reads the student's labels, but was given {counts[target]} microbatches, and "
                f"another rank {max(counts)}: give with_teacher the same microbatches on each rank that reads data"
            )
    if isinstance(teacher, RemoteTeacher):
        inputs = [each for each, _ in microbatches]
        records = teacher.entries(inputs, top_k, student.temperature, student.vocab_size, grid.pipe.rank == target)
        return _joined(microbatches, records) if grid.pipe.rank == target else list(microbatches)
    with loss.recording(top_k, student.temperature) as records:
        teacher.eval_batch(iter(microbatches) if microbatches else None, num_micro_batches=max(counts))
    if source != target:
        channel = channel_between(grid, (source, target), "teacher", _TAG)
        if channel is not None and grid.pipe.rank == source:
            for index, record in enumerate(records):
                channel.send(flatten(record), index, index)
            channel.limit(0)
        elif channel is not None:
            found = [receive_value(channel, index).wait() for index in range(max(counts))]
            records = [unflatten(channel.schemas[index], each) for index, each in enumerate(found)]
    if grid.pipe.rank != target:
        return list(microbatches)
    return _joined(microbatches, records)


def _joined(microbatches: Sequence[tuple[Any, Any]], records: Sequence[dict[str, Tensor]]) -> list[tuple[Any, Any]]:
    return [(inputs, {**labels, **record}) for (inputs, labels), record in zip(microbatches, records, strict=True)]
