"""Fields of microbatches: labels, and parts of the inputs, that the reading ranks send to ranks that need them.

The ranks of the first stage read the data. After that each sends to every rank of its pipe axis the fields that this
rank needs, in one message for each microbatch, and not by way of the stages between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from .module import PipelineModule
from .p2p import Channel, channel_between, receive_value
from .schema import flatten, unflatten

_TAG = 1  # the channels between stages have the tags from 2 on

Fields = Mapping[str, Any]  # name -> value


class MicrobatchItem(NamedTuple):
    """One microbatch as it was read.

    Attributes:
        inputs: input of the first layer.
        labels: labels of the loss.
        entries: further fields by name: the entries of inputs that are a dict, or of a batch that is a dict.
    """

    inputs: Any
    labels: Any
    entries: Mapping[str, Any] = {}

    def field(self, name: str) -> Any:
        """Return a field: ``labels``, ``inputs``, or an entry.

        Raises:
            KeyError: the microbatch has no such field; the message lists its fields.
        """
        known = {**self.entries, "inputs": self.inputs, "labels": self.labels}
        if name not in known:
            raise KeyError(f"it has no field {name!r}, but {', '.join(known)}")
        return known[name]


def item_of(value: Any, taken: Collection[str]) -> MicrobatchItem:
    """Return a microbatch of the data as an item.

    Of a dict, as transformers' data collators return it, the entry ``labels`` are the labels, and the inputs are
    ``input_ids`` and the entries that no layer takes by their names: a dict, or the tensor if ``input_ids`` is alone.

    Args:
        value: a pair ``(inputs, labels)``, or a dict.
        taken: names of the fields that layers take.

    Raises:
        TypeError: it is something else, or a dict without labels or inputs.
    """
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value)) or "nothing"
        if "labels" not in value:
            raise TypeError(f"is a dict of {names}, without 'labels': add them, as 'labels': None if there are none")
        entries = {name: entry for name, entry in value.items() if name != "labels"}
        inputs = {name: entry for name, entry in entries.items() if name == "input_ids" or name not in taken}
        if not inputs:
            raise TypeError(f"is a dict of {names}, and leaves nothing for the first layer: add 'input_ids'")
        lone = list(inputs) == ["input_ids"]
        return MicrobatchItem(inputs["input_ids"] if lone else inputs, value["labels"], entries)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        length = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
        raise TypeError(
            f"is a {type(value).__name__}{length}, not a pair (inputs, labels): let the iterator return pairs, or "
            "dicts with 'labels'"
        )
    inputs, labels = value
    return MicrobatchItem(inputs, labels, inputs if isinstance(inputs, Mapping) else {})


class FieldMessages:
    """Messages with fields from the rank of the first stage to the other ranks of its pipe axis.

    Collective over the pipe axis when it is made.

    Args:
        module: the model, whose stages say which rank reads.
        needs: rank on the pipe axis -> the names of the fields that it needs.

    Attributes:
        names: names of the fields that any rank needs, including the rank that reads.
    """

    def __init__(self, module: PipelineModule, needs: Mapping[int, Sequence[str]]) -> None:
        reader = module.placement[0]
        self.names = tuple(dict.fromkeys(name for names in needs.values() for name in names))
        self._needs = {rank: tuple(names) for rank, names in sorted(needs.items()) if names and rank != reader}
        self._channels: dict[int, Channel] = {}  # by the receiving rank
        for rank in self._needs:
            channel = channel_between(module.grid, (reader, rank), f"fields{rank}", _TAG)
            if channel is not None:
                self._channels[rank] = channel
        self._receives = module.grid.pipe.rank in self._needs

    def forget_schemas(self) -> None:
        """Drop the schemas of earlier messages, on both ends."""
        for channel in self._channels.values():
            channel.schemas.clear()

    def wait_sent(self) -> None:
        """Wait for this rank's sends, and free their tensors. After a program it is short: all messages are there."""
        for channel in self._channels.values():
            channel.limit(0)

    def abandon(self) -> None:
        """After a failure: drop every message, so that the connections to the other ranks can close."""
        for channel in self._channels.values():
            channel.abandon()

    def exchange(self, fields: Sequence[Fields], kinds: Sequence[int]) -> Sequence[Fields]:
        """Send the fields of all microbatches, or receive them. Call it on every rank.

        Args:
            fields: all ``names`` of each microbatch, on the reading rank.
            kinds: of each microbatch a number that is equal for fields of one schema.

        Returns:
            The fields of each microbatch that are on this rank.
        """
        if self._receives:
            (channel,) = self._channels.values()
            receives = [receive_value(channel, kind) for kind in kinds]
            tensors = [receive.wait() for receive in receives]
            return [unflatten(channel.schemas[kind], leaves) for kind, leaves in zip(kinds, tensors, strict=True)]
        for rank, channel in self._channels.items():
            for index, (own, kind) in enumerate(zip(fields, kinds, strict=True)):
                channel.send(flatten({name: own[name] for name in self._needs[rank]}), kind, index)
        return fields
