"""A teacher on a grid of its own, in other processes: ``RemoteTeacher`` in the student's, ``serve_teacher`` there.

Student and teacher are two jobs, each with its own ``torch.distributed`` world. Rank 0 of the teacher and, of each
replica of the student, the rank that reads the labels meet in a process group of gloo, on the host:

    request     8 + n + 8 N                bytes     a length, JSON of n bytes, int64 tokens
    answer      8 + n + N k (b + 4)        bytes     with top_k, for N tokens of the replica's microbatches
                8 + n + N V b              bytes     without: logits of the whole vocabulary

b is 4, or 8 for a teacher in float64; without top_k it is the size of one of the teacher's logits. n is less than 150
and 20 for each microbatch. The rank of the student then sends the answer on: to each other tensor rank N k (b + 4)
bytes, or N V / t x b (V / t rounded up). On a context axis of c ranks it sends the whole answer to the others before.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...context.order import unshard
from ...grid.agreement.agreement import agreed
from ...grid.ranges import split
from ...models.huggingface.transfer import transfer_group
from .distillation import IDS, TEACHER, distill_loss_of

if TYPE_CHECKING:
    from ...engine.pipeline_engine import PipelineEngine

Entries = dict[str, Tensor]  # the teacher's entries of the labels of a microbatch

_TAG = 2  # of tensors that go to or come from one rank of a grid


class RemoteTeacher:
    """Teacher of ``with_teacher`` that another job runs with ``serve_teacher``. Collective over the student's ranks.

    It waits at most for the ``timeout`` of the student's grid: for the teacher to start, and for each answer. As a
    context manager it calls ``close`` at the end, unless an error ends the context.

    Args:
        engine: engine of the student.
        address: host:port that ``serve_teacher`` was given.

    Attributes:
        sent, received: bytes to and from the teacher so far, on the rank that reads the labels of a replica; else 0.

    Raises:
        ValueError: the address cannot be used.
        RuntimeError: the teacher was not there within the time.
    """

    def __init__(self, engine: PipelineEngine, address: str) -> None:
        self.grid, self.address = engine.grid, address
        self.sent = self.received = 0
        self._closed = False
        self._group: dist.ProcessGroup | None = None
        reader = engine.module.placement[0 if engine.options.batch.labels == "sent" else -1]
        grid = self.grid
        with agreed(grid, None):
            if grid.pipe.rank == reader and grid.tensor.rank == grid.context.rank == 0:
                size = 1 + grid.data.size
                self._group = transfer_group(address, 1 + grid.data.rank, size, timeout=grid.timeout)

    def __enter__(self) -> RemoteTeacher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """Let ``serve_teacher`` return. Collective."""
        with agreed(self.grid, RuntimeError):
            if self._group is not None:
                self.sent += _send_json(self._group, 0, None)
        self._group, self._closed = None, True

    def entries(
        self, tokens: Sequence[Any], top_k: int | None, temperature: float, vocab_size: int, reads: bool
    ) -> list[Entries]:
        """Return the entries of the labels of each microbatch; an empty list on ranks that do not read. Collective.

        Args:
            tokens: inputs of the microbatches, integers (B, T).
            top_k: number of words; None: the logits of all.
            temperature: divisor of the logits, for ``top_k``.
            vocab_size: V.
            reads: True on the pipe rank that reads the student's labels.

        Raises:
            RuntimeError: on every rank: the teacher failed or is gone, or inputs are no tokens.
        """
        found: Any = []
        dtype = None
        with agreed(self.grid, RuntimeError):
            if self._closed:
                raise ValueError(
                    f"the connection to the teacher at {self.address} is closed: make another RemoteTeacher"
                )
            if reads:
                _require_tokens(tokens)
            if self._group is not None:
                request = {"top_k": top_k, "temperature": temperature, "vocab_size": vocab_size}
                try:
                    found, dtype = self._ask(self._group, request, tokens)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"the teacher at {self.address} is gone or did not answer within {self.grid.timeout} s (the "
                        f"timeout of the student's grid); its own output says why: {error}"
                    ) from error
                if isinstance(found, str):
                    raise RuntimeError(f"the teacher at {self.address} failed: {found}")
        dtype = next(each for each in self.grid.world.all_gather_json(dtype) if each is not None)
        if not reads:
            return []
        width = vocab_size if top_k is None else top_k
        kinds = {TEACHER: getattr(torch, dtype)} | ({} if top_k is None else {IDS: torch.int32})
        mine = []
        for index, each in enumerate(tokens):
            parts = {}
            for name, kind in kinds.items():
                given = found[index][name] if self._group is not None else torch.empty(*each.shape, width, dtype=kind)
                parts[name] = self._spread(given.to(self.grid.device), top_k is None)
            mine.append(parts)
        return mine

    def _ask(self, group: dist.ProcessGroup, request: dict[str, Any], tokens: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the whole entries of each microbatch and their dtype; or the text of the teacher's error, and None."""
        shapes = [list(each.shape) for each in tokens]
        self.sent += _send_json(group, 0, {**request, "shapes": shapes})
        self.sent += _send(group, 0, torch.cat([each.flatten().long() for each in tokens]))
        answer, size = _receive_json(group, 0)
        self.received += size
        if "error" in answer:
            return answer["error"], None
        found, top_k = [], request["top_k"]
        for shape in shapes:
            whole = torch.empty(*shape, top_k or request["vocab_size"], dtype=getattr(torch, answer["dtype"]))
            entries = {TEACHER: whole} | (
                {} if top_k is None else {IDS: whole.new_empty(whole.shape, dtype=torch.int32)}
            )
            for each in entries.values():
                self.received += _receive(group, 0, each)
            found.append(entries)
        return found, answer["dtype"]

    def _spread(self, whole: Tensor, cut: bool) -> Tensor:
        """Return this rank's part of an entry that the first rank of the context and tensor axes has whole.

        Args:
            whole: (B, T, W); on other ranks its values are not used.
            cut: the tensor rank's words alone, with a column of padding where it has one less than others.
        """
        context, tensor = self.grid.context, self.grid.tensor
        if tensor.rank == 0:
            context.broadcast(whole)
        if tensor.size == 1:
            return whole
        if not cut:
            tensor.broadcast(whole)
            return whole
        width, most = whole.shape[-1], -(-whole.shape[-1] // tensor.size)
        spans = [split(width, tensor.size, rank) for rank in range(tensor.size)]
        if tensor.rank > 0:
            mine = whole.new_empty(*whole.shape[:-1], most)
            tensor.receive(mine, 0, _TAG).wait()
            return mine
        shards = [F.pad(whole[..., start:stop], (0, most - (stop - start))).contiguous() for start, stop in spans]
        for rank, each in enumerate(shards[1:], 1):
            tensor.send(each, rank, _TAG).wait()
        return shards[0]


def serve_teacher(engine: PipelineEngine, address: str, replicas: int = 1) -> int:
    """Answer a student in another job until it calls ``RemoteTeacher.close``. Collective over the teacher's ranks.

    The teacher's data replicas share the microbatches of each call of ``with_teacher``. A call waits at most for the
    ``timeout`` of the teacher's grid for the next one of the student: give it longer than a step of the student.

    Args:
        engine: engine of the teacher, without an optimizer, whose ``loss_fn`` is a ``distill_loss`` of any kind.
        address: host:port of the teacher's rank 0, at which rank 0 and the student meet; the port must be free there.
        replicas: size of the student's data axis.

    Returns:
        The number of microbatches that were answered.

    Raises:
        TypeError: the model has another loss function.
        ValueError: the vocabularies differ, which every rank of the student raises too, as any error of an evaluation.
        RuntimeError: the student is gone, did not ask within the time, or its replicas ask for different things.
    """
    grid, served = engine.grid, 0
    with agreed(grid, None):
        loss = distill_loss_of(engine, "the teacher")
        group = transfer_group(address, 0, 1 + replicas, timeout=grid.timeout) if grid.rank == 0 else None
    while True:
        heads, tokens = _requests(engine, group, replicas)
        if heads[0] is None:
            return served
        first = heads[0]
        try:
            if first["vocab_size"] != loss.vocab_size:
                raise ValueError(
                    f"the student has a vocabulary of {first['vocab_size']}, the teacher of {loss.vocab_size}: take a "
                    "teacher with the same tokens"
                )
            with loss.recording(first["top_k"], first["temperature"]) as records:
                _evaluate(engine, tokens)
        except Exception as error:
            if group is not None:
                with contextlib.suppress(RuntimeError):  # a student that is gone
                    for replica in range(replicas):
                        _send_json(group, 1 + replica, {"error": f"{type(error).__name__}: {error}"})
            raise
        counts, lost = [len(each["shapes"]) for each in heads], None
        answers = _gathered(engine, records, [each.shape[1] for each in tokens], first["top_k"], loss.vocab_size)
        for replica, count in enumerate(counts):
            for index in range(count):
                entries = next(answers)  # also after a replica is lost: the other ranks send to this one
                if group is not None and lost is None:
                    try:
                        if index == 0:
                            dtype = str(entries[TEACHER].dtype).removeprefix("torch.")
                            _send_json(group, 1 + replica, {"dtype": dtype})
                        for each in entries.values():
                            _send(group, 1 + replica, each)
                    except RuntimeError as error:
                        lost = _lost(replica, "did not take its answer", grid.timeout, error)
        with agreed(grid, RuntimeError):
            if lost is not None:
                raise lost
        served += sum(counts)


def _requests(engine: PipelineEngine, group: dist.ProcessGroup | None, replicas: int) -> tuple[list[Any], list[Tensor]]:
    """Return each replica's request, None at the end, and the tokens (B, T) of all microbatches. Collective."""
    grid, heads, flat = engine.grid, list[Any](), list[Tensor]()
    with agreed(grid, RuntimeError):
        for replica in range(replicas if group is not None else 0):
            assert group is not None
            try:
                heads.append(_receive_json(group, 1 + replica)[0])
                if heads[-1] is not None:
                    count = sum(rows * length for rows, length in heads[-1]["shapes"])
                    flat.append(torch.empty(count, dtype=torch.int64))
                    _receive(group, 1 + replica, flat[-1])
            except RuntimeError as error:
                raise _lost(replica, "asked for nothing", grid.timeout, error) from error
        asked = [None if each is None else {**each, "shapes": None} for each in heads]
        if any(each != asked[0] for each in asked):
            raise RuntimeError(f"the replicas of the student ask for different things: {asked}")
    heads = grid.world.all_gather_json(heads)[0]
    shapes = [tuple(shape) for each in heads if each is not None for shape in each["shapes"]]
    sizes = [rows * length for rows, length in shapes]
    whole = (torch.cat(flat) if flat else torch.empty(sum(sizes), dtype=torch.int64)).to(grid.device)
    if shapes:
        grid.world.broadcast(whole)
    return heads, [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]


def _lost(replica: int, how: str, seconds: float, error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"replica {replica} of the student is gone or {how} within {seconds} s (the timeout of the teacher's grid); "
        f"its own output says why: {error}"
    )


def _evaluate(engine: PipelineEngine, tokens: Sequence[Tensor]) -> None:
    """Run the teacher: replica r of R takes microbatches r, r + R, ..., and the last one again where it has less."""
    data = engine.grid.data
    count = -(-len(tokens) // data.size)
    mine = [tokens[min(data.rank + index * data.size, len(tokens) - 1)] for index in range(count)]
    reads = engine.options.batch.labels != "sent" or engine.module.is_first
    engine.eval_batch(iter([(x, {"labels": x}) for x in mine]) if reads else None, num_micro_batches=count)


def _gathered(
    engine: PipelineEngine, records: list[Entries], lengths: Sequence[int], top_k: int | None, vocab_size: int
) -> Iterator[Entries]:
    """Yield the whole entries of each microbatch on rank 0, on the CPU; empty ones on the others. Collective.

    Args:
        engine: the teacher's.
        records: this rank's entries of the microbatches that it evaluated; none if it has not the last stage.
        lengths: T of each microbatch.
        top_k: as for ``with_teacher``.
        vocab_size: V.
    """
    grid, words = engine.grid, engine.grid.tensor.size
    told = [{name: (list(x.shape), x.dtype) for name, x in each.items()} for each in records]
    everyone = grid.world.all_gather_json(told)
    for index, length in enumerate(lengths):
        turn, replica = divmod(index, grid.data.size)
        place = {"pipe": engine.module.placement[-1], "data": replica}
        entries = Entries()
        for name in (TEACHER,) if top_k is None else (TEACHER, IDS):
            parts = []  # of each context rank
            for context in range(grid.context.size):
                place |= {"context": context} if grid.context.size > 1 else {}
                shards = []
                for shard in range(words if top_k is None else 1):
                    holder = grid.topology.rank(**place, tensor=shard)
                    if grid.rank == holder:
                        held = records[turn][name].contiguous()
                        shards.append(held)
                        if holder != 0:
                            grid.world.send(held, 0, _TAG).wait()
                    elif grid.rank == 0:
                        shape, dtype = everyone[holder][turn][name]
                        shards.append(torch.empty(shape, dtype=dtype, device=grid.device))
                        grid.world.receive(shards[-1], holder, _TAG).wait()
                if grid.rank == 0:
                    spans = [split(vocab_size, words, shard) for shard in range(words)]
                    if top_k is None:
                        shards = [x[..., : stop - start] for x, (start, stop) in zip(shards, spans, strict=True)]
                    parts.append(torch.cat(shards, -1))
            if grid.rank == 0:
                entries[name] = unshard(parts, length).cpu()
        yield entries


def _require_tokens(inputs: Sequence[Any]) -> None:
    for each in inputs:
        if not isinstance(each, Tensor) or each.dim() != 2 or each.is_floating_point():
            raise TypeError(
                "a remote teacher takes microbatches whose inputs are one tensor of tokens, integers (B, T), but was "
                f"given {tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__}: leave packed samples "
                "and other inputs out, or run the teacher on the student's grid"
            )


def _send(group: dist.ProcessGroup, to: int, tensor: Tensor) -> int:
    """Send a tensor to a rank of a group, and return its bytes."""
    whole = tensor.detach().cpu().contiguous()
    group.send([whole], to, 0).wait()
    return whole.nbytes


def _receive(group: dist.ProcessGroup, source: int, tensor: Tensor) -> int:
    """Receive into a contiguous tensor on the CPU, and return its bytes."""
    group.recv([tensor], source, 0).wait()
    return tensor.nbytes


def _send_json(group: dist.ProcessGroup, to: int, value: Any) -> int:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return _send(group, to, torch.tensor([len(text)])) + _send(group, to, text)


def _receive_json(group: dist.ProcessGroup, source: int) -> tuple[Any, int]:
    """Return a value and the number of bytes that were received."""
    length = torch.empty(1, dtype=torch.int64)
    size = _receive(group, source, length)
    text = torch.empty(int(length), dtype=torch.uint8)
    size += _receive(group, source, text)
    return json.loads(bytes(text.tolist())), size
