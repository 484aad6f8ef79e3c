"""Matching of the recorded operations: every rank of a group must ask for the same collectives in the same order.

On a cluster a difference is a hang, or data in the wrong tensor. Messages are matched by their two ranks and tag: the
n-th send of one is the n-th receive of the other, of the same size and dtype.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from .classes import Classes
from .group import RecordedOperation

_MESSAGES = ("send", "receive")
_NAMED = 3  # ranks in one sentence


class RankOperations:
    """Recorded operations of one rank, by group.

    Attributes:
        collectives: (name of the group, its number among those of that name) -> collectives in order.
        messages: (rank of the other end, tag, ``send`` or ``receive``) -> messages in order.
        ranks: (name, number) -> global ranks of the group.
        ended: the rank came to the end of its step.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.collectives: dict[tuple[str, int], list[RecordedOperation]] = defaultdict(list)
        self.messages: dict[tuple[int, int, str], list[RecordedOperation]] = defaultdict(list)
        self.ranks: dict[tuple[str, int], tuple[int, ...]] = {}
        self.ended = record["outcome"] in ("step", "no step")
        keys, counts = [], defaultdict[str, int](int)
        for group in record["groups"]:
            name = group["name"] or "group of its own"
            keys.append((name, counts[name]))
            counts[name] += 1
            self.ranks[keys[-1]] = tuple(group["ranks"])
            self.collectives[keys[-1]] = []
        for fields in record["operations"]:
            operation = RecordedOperation(*fields)
            key = keys[operation.group]
            if operation.kind in _MESSAGES:
                other = self.ranks[key][operation.peer]
                self.messages[other, operation.tag, operation.kind].append(operation)
            else:
                self.collectives[key].append(operation)


def mismatches(classes: Classes, records: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each difference between ranks that would hang or corrupt data on a cluster.

    Args:
        classes: the classes of the ranks.
        records: rank -> its record.
    """
    ranks = {rank: RankOperations(record) for rank, record in sorted(records.items())}
    return list(dict.fromkeys([*_collectives(classes, ranks), *_messages(classes, ranks)]))


class _Difference(NamedTuple):
    """First difference of two ranks' collectives over a group. ``other`` is None if the second rank has no more."""

    key: tuple[str, int]
    number: int
    ranks: tuple[int, int]
    one: RecordedOperation | None
    other: RecordedOperation | None


def _collectives(classes: Classes, ranks: Mapping[int, RankOperations]) -> Iterator[str]:
    """Yield a sentence for each operation that some ranks run where the others run another one."""
    found = list(_differences(classes, ranks))
    often = Counter(rank for each in found for rank in each.ranks)
    sizes = {signature: len(members) for signature, members in classes.members().items()} if found else {}
    # The rank to name is of the smaller class, or differs from most others.
    odds = {rank: (-sizes[classes.signature(rank)], often[rank]) for rank in often}
    odd: dict[tuple[Any, ...], dict[int, None]] = {}
    usual: dict[tuple[Any, ...], tuple[int, RecordedOperation | None]] = {}
    for each in found:
        (rank, one), (other, two) = zip(each.ranks, (each.one, each.other), strict=True)
        if (odds[other], two is not None) > (odds[rank], one is not None):
            rank, one, other, two = other, two, rank, one
        key = (each.key, each.number, one)
        odd.setdefault(key, {})[rank] = None
        usual.setdefault(key, (other, two))
    for key, its in odd.items():
        (name, _), number, one = key
        over = "over all ranks" if name == "world" else f"over the {name} axis"
        other, two = usual[key]
        names = ", ".join(_name(classes, rank) for rank in list(its)[:_NAMED])
        names += f" and {len(its) - _NAMED} more" if len(its) > _NAMED else ""
        runs = ("runs" if len(its) == 1 else "run") + (f" {_what(one)}" if one is not None else " nothing more")
        theirs = f"runs {_what(two)}" if two is not None else "runs nothing more"
        yield f"{names} {runs} as collective {number} {over}, where {_name(classes, other)} {theirs}"


def _differences(classes: Classes, ranks: Mapping[int, RankOperations]) -> Iterator[_Difference]:
    stands: dict[Any, int] = {}
    for rank in ranks:
        stands.setdefault(classes.signature(rank), rank)
    compared = set()
    for rank, mine in ranks.items():
        for key, members in mine.ranks.items():
            # Ranks that ran themselves, and for the others the rank that ran of their class.
            others = {member if member in ranks else stands.get(classes.signature(member)) for member in members}
            for other in sorted(each for each in others if each is not None and each != rank):
                pair = (key, *sorted((rank, other)))
                if pair not in compared and key in ranks[other].ranks:
                    compared.add(pair)
                    yield from _difference(key, (rank, other), mine, ranks[other])


def _difference(
    key: tuple[str, int], pair: tuple[int, int], mine: RankOperations, theirs: RankOperations
) -> Iterator[_Difference]:
    for number, (one, two) in enumerate(zip_longest(mine.collectives[key], theirs.collectives[key]), 1):
        if one is None or two is None:
            if mine.ended and theirs.ended:
                yield _Difference(key, number, pair, one, two)
            return
        if (one.kind, one.size, one.dtype) != (two.kind, two.size, two.dtype):
            yield _Difference(key, number, pair, one, two)
            return


def _messages(classes: Classes, ranks: Mapping[int, RankOperations]) -> Iterator[str]:
    for rank, mine in ranks.items():
        for (other, tag, kind), sent in mine.messages.items():
            if other not in ranks or kind != "send":
                continue
            received = ranks[other].messages.get((rank, tag, "receive"), [])
            for number, (one, two) in enumerate(zip(sent, received, strict=False), 1):
                if (one.size, one.dtype) != (two.size, two.dtype):
                    yield (
                        f"{_name(classes, rank)} sends {_what(one)} as message {number} with tag {tag} to "
                        f"{_name(classes, other)}, which receives {_what(two)}"
                    )
                    break
            else:
                if len(sent) != len(received) and mine.ended and ranks[other].ended:
                    yield (
                        f"{_name(classes, rank)} sends {len(sent)} messages with tag {tag} to {_name(classes, other)}, "
                        f"which receives {len(received)}: see {(sent or received)[-1].place}"
                    )
        for (other, tag, kind), received in mine.messages.items():
            if kind != "receive" or other not in ranks or ranks[other].messages.get((rank, tag, "send")):
                continue
            if mine.ended and ranks[other].ended:
                yield (
                    f"{_name(classes, rank)} receives {len(received)} messages with tag {tag} from "
                    f"{_name(classes, other)}, which sends none: see {received[0].place}"
                )


def _what(operation: RecordedOperation) -> str:
    size = "" if operation.size < 0 else f" of {operation.size:,} {operation.dtype}"
    kind = {"send": "", "receive": ""}.get(operation.kind, operation.kind)
    text = f"{kind}{size}".strip() or "an unknown number of elements"
    return f"{text} ({operation.place or 'an unknown place'})"


def _name(classes: Classes, rank: int) -> str:
    place = classes.topology.coordinate(rank)._asdict()
    return f"rank {rank} ({', '.join(f'{axis} {at}' for axis, at in place.items())})"
