"""Resident memory of a process, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MMAP_THRESHOLD = -3  # of glibc's mallopt
_THP_DISABLE = 41  # PR_SET_THP_DISABLE of Linux's prctl: no transparent huge pages


def status(key: str) -> int:
    """Bytes: ``VmRSS`` (now), ``VmHWM`` (at the most), ``RssAnon``, ``RssFile``, ``RssShmem``, ``VmData`` ..."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def rest() -> int:
    """Bytes resident now, when what can be collected is gone; the peak, ``VmHWM``, starts from here again.

    What the allocator's heap holds free from before goes too: given back later, it would hide as much new memory.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def held() -> int:
    """Bytes resident now, without the pages of programs and libraries.

    Those the kernel drops where memory is short, and reads again, as it sees fit: megabytes more one time than another.
    """
    total, counted = 0, False
    with Path("/proc/self/smaps").open() as lines:  # line by line: as one text it would be megabytes of what it counts
        for line in lines:
            first, *more = line.split(None, 5)
            if not first.endswith(":"):  # a mapping: its address, rights, offset, device, inode and path
                counted = more[3] == "0" or more[-1].rstrip().endswith("(deleted)")
            elif counted and first == "Rss:":
                total += int(more[0]) * 1024
    return total


class Growth:
    """Bytes that the process takes from now on, for what it holds: its peak, and now."""

    def __init__(self) -> None:
        resident, self._held = rest(), held()
        self._others = resident - self._held

    def measure(self) -> tuple[int, int]:
        """Return the growth at the peak and now."""
        now, peak = held(), status("VmHWM")
        return peak - max(self._others, status("VmRSS") - now) - self._held, now - self._held


@contextmanager
def own_pages() -> Iterator[None]:
    """Within it each tensor of 64 KiB or more has pages of its own, of 4 KiB, returned at once when it is freed.

    Else the allocator's heap keeps freed pages as it sees fit, more one time than another, and the kernel gives 2 MiB
    at once where a page is asked for.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 2**16)
    libc.prctl(_THP_DISABLE, 1, 0, 0, 0)
    yield
    libc.prctl(_THP_DISABLE, 0, 0, 0, 0)
    libc.mallopt(_MMAP_THRESHOLD, 2**25)  # the most that it sets by itself
