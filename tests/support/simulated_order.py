"""Order of the accesses of streams to memory, by vector clocks, as in torch.cuda._sanitizer.

Each stream counts its operations. A clock says, for each stream, up to which operation of it all is done: a stream has
one, an event is a copy of one, and the host has one. Two accesses of two streams to the same bytes need an
order if one of them is a write: the later stream, or the host before it, must have waited for the earlier access.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

Clock = Counter[int]  # stream -> number of its operations that are done


@dataclass
class Uses:
    """Accesses to one piece of memory.

    Attributes:
        owner: the stream on which the memory was allocated.
        accesses: (stream, first byte, end, True if written) -> number of the operation in its stream, and its line.
        recorded: the streams of ``record_stream``.
    """

    owner: int
    accesses: dict[tuple[int, int, int, bool], tuple[int, str]] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)


class Order:
    """Clocks of the streams of one device, and of the host.

    Attributes:
        current: number of the current stream; 0 is the default stream.
        clocks: clock of each stream that has run an operation or has waited.
        host: clock of the host.
    """

    def __init__(self) -> None:
        self.current = 0
        self.clocks: defaultdict[int, Clock] = defaultdict(Counter)
        self.host: Clock = Counter()

    def everything(self) -> Clock:
        """Return the clock at which all operations so far are done."""
        return Counter({stream: clock[stream] for stream, clock in self.clocks.items()})

    def access(self, uses: Uses, start: int, stop: int, write: bool, line: str) -> str:
        """Note an access of the current stream to some bytes. Return what it should have waited for, or ""."""
        clock = self.clocks[self.current]
        clock[self.current] += 1
        fault = ""
        if len(self.clocks) > 1:
            for (stream, first, end, wrote), (count, other) in uses.accesses.items():
                if (write or wrote) and start < end and first < stop and self._waits(stream, count, self.current):
                    kinds = f"{'writes' if write else 'reads'} what stream {stream} {'writes' if wrote else 'reads'}"
                    fault = f"stream {self.current} {kinds} at {other}, and has not waited for it: at {line}"
        uses.accesses[self.current, start, stop, write] = clock[self.current], line
        return fault

    def release(self, uses: Uses, line: str) -> str:
        """Return which use of memory may not be over when it is released, or ""."""
        for (stream, *_), (count, other) in uses.accesses.items():
            if stream not in uses.recorded and self._waits(stream, count, uses.owner):
                used = f"stream {stream} uses at {other}"
                return f"memory of stream {uses.owner} that {used} was released without record_stream: at {line}"
        return ""

    def _waits(self, stream: int, count: int, other: int) -> bool:
        """Return True if another stream may run before this operation of a stream is done."""
        return stream != other and max(self.clocks[other][stream], self.host[stream]) < count
