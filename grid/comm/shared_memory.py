"""Memory that the ranks of one host share: a message is copied into it once, and read by its receivers where it lies.

    sender      copies its tensor into its own memory, and sends each receiver a note: where, under which tag
    receiver    waits for the note, reads the tensor in the sender's memory, and counts it as read
    sender      learns from the receiver's next note how many were read, and uses their memory again

A message through a TCP socket of the same host is copied twice by the kernel, while a thread of gloo and the thread
that computes take turns on a core: 4 MB between two ranks that both compute take each of them four times as much of
its core. The memory has no name in any file system (``memfd``), and its descriptor travels over a Unix socket without
a name in one, so nothing is left when a process is killed. The notes travel over such sockets too: a wait ends when
the other process ends or leaves, and after the grid's time limit.

A sender never waits for a receiver, so collectives may be waited for in any order. Linux only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

MAX_RANKS = 16  # of an axis: each needs three file descriptors for each other
_ROOM = 2**34  # bytes of address space of one rank's memory on one axis; only what is in use at once has pages
_KEPT = 2**23  # bytes of it whose pages are kept for the next messages
_LARGE = 2**16  # bytes of a message whose receiver says at once that it has read it
_NOTE = struct.Struct("<QQQQ")  # tag, first byte, bytes, number of the receiver's messages that the sender has read
_READ = 2**64 - 1  # tag of a note without a message: of what was read. Of small messages it is sent for so many:
_UNTOLD = 4
_HELLO = struct.Struct("<QQ")  # number of the axis, rank of the sender
_CREDENTIALS = struct.Struct("<iII")  # process, user, group
_NO_MORE = "no more messages come from it"

Address = tuple[str, str]  # of the host, of the socket on it


class LocalEndpoint:
    """Socket at which the processes of this host reach this one. It has no name in a file system.

    Args:
        timeout: seconds after which a wait for another rank fails.

    Attributes:
        timeout: as given.
        address: what the others must know.

    Raises:
        OSError: the system has no such memory or sockets.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout, self._timeval = timeout, struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        descriptor = _memory()  # whether there may be such memory here
        mmap.mmap(descriptor, _ROOM).close()
        os.close(descriptor)
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise OSError("the address space is limited")
        token = secrets.token_hex(16)
        self._listener = self._timed(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(f"\0triax-{token}")
        self._listener.listen(1024)
        self.address: Address = (_host(), token)
        self._arrived: dict[tuple[int, int], tuple[socket.socket, int]] = {}
        self._accepting, self._changed = False, threading.Condition()
        self._sockets = [self._listener]
        weakref.finalize(self, _close, self._sockets, os.getpid())

    def close(self) -> None:
        """End all connections: ranks that wait for this one stop at once."""
        _close(self._sockets, os.getpid())

    def connect(self, address: Address, axis: int, rank: int, memory: int) -> socket.socket:
        """Connect to another process of this host, and give it this rank's memory of an axis."""
        made = self._timed(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._sockets.append(made)
        made.connect(f"\0triax-{address[1]}")
        socket.send_fds(made, [_HELLO.pack(axis, rank)], [memory])
        return made

    def accept(self, axis: int, rank: int, out: socket.socket | None) -> tuple[socket.socket, int] | None:
        """Wait for the connection of a rank on an axis; return it, and the descriptor of the rank's memory.

        Args:
            axis, rank: of ``connect``.
            out: this rank's connection to it, which ends when the other process does. None: do not wait, and return
                None if it has not connected.

        Raises:
            OSError: the other process has ended, or the time limit has expired.
        """
        watched, limit = select.poll(), time.monotonic() + self.timeout
        watched.register(self._listener, select.POLLIN)
        if out is not None:
            watched.register(out, 0)  # its end alone
        while True:
            with self._changed:
                if (axis, rank) in self._arrived:
                    return self._arrived.pop((axis, rank))
                if self._accepting:  # one thread accepts, and its connection may be another's
                    if out is None:
                        return None
                    self._changed.wait(0.1)
                    continue
                self._accepting = True
            try:
                ready = dict(watched.poll(0 if out is None else 1e3 * max(limit - time.monotonic(), 0.0)))
                if self._listener.fileno() in ready:
                    self._accept_next()
                elif out is None:
                    return None
                elif ready:
                    raise ConnectionResetError(_NO_MORE)
                else:
                    raise BlockingIOError
            finally:
                with self._changed:
                    self._accepting = False
                    self._changed.notify_all()

    def _accept_next(self) -> None:
        made, _ = self._listener.accept()
        self._sockets.append(self._timed(made))
        peer = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] == os.geteuid():  # for another user's process this rank is not there
            hello, descriptors, _, _ = socket.recv_fds(made, _HELLO.size, 1)
            if len(hello) == _HELLO.size and descriptors:
                self._arrived[_HELLO.unpack(hello)] = (made, descriptors[0])
                return
        self._sockets.remove(made)
        made.close()

    def _timed(self, made: socket.socket) -> socket.socket:
        made.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            made.setsockopt(socket.SOL_SOCKET, option, self._timeval)
        return made


class SharedMemory:
    """Messages between this rank and the others of one axis, all of them on this host.

    Args:
        endpoint: this process's.
        number: number of the axis, the same on all its ranks.
        ranks: the global ranks of the axis.
        rank: position of this one.
        addresses: the addresses of the axis's ranks, in their order.
    """

    def __init__(
        self, endpoint: LocalEndpoint, number: int, ranks: Sequence[int], rank: int, addresses: Sequence[Address]
    ) -> None:
        self._endpoint, self._number, self._ranks, self._rank = endpoint, number, ranks, rank
        self._peers = [_Peer(address) for address in addresses]
        self._descriptor = _memory()
        weakref.finalize(self, os.close, self._descriptor)
        self._mapped: mmap.mmap | None = None
        self._regions: list[_Region] = []  # in use, by their place

    def put(self, tensor: Tensor, peers: Sequence[int], tag: int) -> None:
        """Send a tensor, of any dtype, to ranks of the axis. It may be changed as soon as this returns."""
        size = tensor.numel() * tensor.element_size()
        for rank in peers:
            unread = self._peers[rank].unread
            if unread and (size >= _LARGE or len(unread) >= 2 * _UNTOLD):
                self._read_note(rank, self._peers[rank], wait=False)
        region = self._place(size, len(peers))
        _view(self._own(), region.start, tensor).copy_(tensor.detach())
        for rank in peers:
            self._peers[rank].unread.append(region)
            self._tell(rank, self._peers[rank], tag, region.start, size)

    def expect(self, source: int, tag: int) -> int:
        """Return the number, for ``take``, of the next message with this tag from a rank."""
        expected = self._peers[source].expected
        expected[tag] = expected.get(tag, -1) + 1
        return expected[tag]

    def take(self, source: int, tag: int, number: int, like: Tensor) -> Tensor:
        """Wait for a message; return it where it lies. It stays there until ``done``.

        Args:
            source: the sender.
            tag, number: which message: ``expect`` returned the number.
            like: a tensor of its shape and dtype.
        """
        peer = self._peers[source]
        while (tag, number) not in peer.notes:
            self._read_note(source, peer, wait=True)
        peer.taken[tag, number] = place, size, _ = peer.notes.pop((tag, number))
        if size != like.numel() * like.element_size():
            raise RuntimeError(
                f"rank {self._ranks[source]} sent {size} bytes, but this rank expects a tensor {tuple(like.shape)} of "
                f"{like.dtype}: give all ranks tensors of the same shape and dtype"
            )
        assert peer.memory is not None
        return _view(peer.memory, place, like)

    def done(self, source: int, tag: int, number: int) -> None:
        """Let the sender use a message's memory again."""
        peer = self._peers[source]
        _, size, index = peer.taken.pop((tag, number))
        peer.finished.add(index)
        while peer.read in peer.finished:
            peer.finished.remove(peer.read)
            peer.read += 1
        if peer.read - peer.told >= (1 if size >= _LARGE else _UNTOLD):
            with contextlib.suppress(OSError):  # it may have left, or its socket may be full of notes: then later
                self._out(peer).send(_NOTE.pack(_READ, 0, 0, peer.read), socket.MSG_DONTWAIT)
                peer.told = peer.read

    def _tell(self, rank: int, peer: _Peer, tag: int, place: int, size: int) -> None:
        """Send a note to a rank."""
        try:
            out, note = self._out(peer), _NOTE.pack(tag, place, size, peer.read)
            try:
                out.send(note, socket.MSG_DONTWAIT)
            except BlockingIOError:  # full of notes: the other rank may be sending too
                for source, each in enumerate(self._peers):
                    if source != self._rank:
                        self._read_note(source, each, wait=False)
                out.sendall(note)
        except OSError as error:
            raise self._lost(rank, error) from error
        peer.told = peer.read

    def _out(self, peer: _Peer) -> socket.socket:
        """Return the connection to a rank, made when it is first asked for."""
        if peer.out is None:
            peer.out = self._endpoint.connect(peer.address, self._number, self._ranks[self._rank], self._descriptor)
        return peer.out

    def _read_note(self, source: int, peer: _Peer, wait: bool) -> None:
        """Read the next note of a rank, or without ``wait`` all that are there."""
        try:
            if peer.into is None:
                found = self._endpoint.accept(self._number, self._ranks[source], None)
                if found is None and not wait:
                    return
                peer.into, descriptor = found or self._await_connection(source, peer)
                peer.memory = mmap.mmap(descriptor, _ROOM)
                os.close(descriptor)
            while True:
                note = peer.into.recv(_NOTE.size, socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT)
                if len(note) < _NOTE.size:
                    raise ConnectionResetError(_NO_MORE)
                tag, place, size, read = _NOTE.unpack(note)
                if tag != _READ:
                    number = peer.arrived[tag] = peer.arrived.get(tag, -1) + 1
                    peer.notes[tag, number] = place, size, peer.count
                    peer.count += 1
                while peer.acknowledged < read:
                    peer.acknowledged += 1
                    self._free(peer.unread.popleft())
                if wait:
                    return
        except OSError as error:
            if wait or not isinstance(error, BlockingIOError):
                raise self._lost(source, error) from error

    def _await_connection(self, source: int, peer: _Peer) -> tuple[socket.socket, int]:
        out = None
        with contextlib.suppress(OSError):  # it has left, perhaps with a last message
            out = self._out(peer)
        found = self._endpoint.accept(self._number, self._ranks[source], out)
        if found is None:
            raise ConnectionResetError(_NO_MORE)
        return found

    def _place(self, size: int, readers: int) -> _Region:
        """Return a free region of this rank's memory, the first that is large enough."""
        size, at = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, 0
        index = 0
        for region in self._regions:
            if region.start - at >= size:
                break
            at, index = region.stop, index + 1
        if at + size > _ROOM:
            raise RuntimeError(
                f"more than {_ROOM} bytes are on their way to the other ranks: wait for some of the operations first"
            )
        made = _Region(at, at + size, readers)
        self._regions.insert(index, made)
        return made

    def _free(self, region: _Region) -> None:
        region.readers -= 1
        if region.readers:
            return
        self._regions.remove(region)
        if region.stop > _KEPT:
            start = max(region.start, _KEPT)
            assert self._mapped is not None
            self._mapped.madvise(mmap.MADV_REMOVE, start, region.stop - start)

    def _own(self) -> mmap.mmap:
        if self._mapped is None:
            self._mapped = mmap.mmap(self._descriptor, _ROOM)
        return self._mapped

    def _lost(self, rank: int, error: OSError) -> RuntimeError:
        name = f"rank {self._ranks[rank]}"
        if isinstance(error, BlockingIOError):
            return RuntimeError(f"Timed out waiting {1e3 * self._endpoint.timeout:.0f}ms for {name}")
        return RuntimeError(f"Connection closed by peer: {name} has ended or left ({error})")


class _Peer:
    """State of the messages from and to one rank."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.out: socket.socket | None = None
        self.unread: deque[_Region] = deque()  # sent, and not known to be read
        self.acknowledged = 0
        self.into: socket.socket | None = None
        self.memory: mmap.mmap | None = None
        self.expected: dict[int, int] = {}  # tag -> number of the last message that was expected, that has arrived
        self.arrived: dict[int, int] = {}
        self.notes: dict[tuple[int, int], tuple[int, int, int]] = {}  # tag, number -> place, bytes, messages before it
        self.taken: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.count = 0  # messages that arrived
        self.read = self.told = 0  # messages that were read, all before them included; of which the sender knows
        self.finished: set[int] = set()  # read, but one before them was not


class _Region:
    __slots__ = ("readers", "start", "stop")

    def __init__(self, start: int, stop: int, readers: int) -> None:
        self.start, self.stop, self.readers = start, stop, readers


def open_endpoint(timeout: float) -> LocalEndpoint | None:
    """Return this process's endpoint; None on a system without such memory."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError):
        return LocalEndpoint(timeout)
    return None


def _memory() -> int:
    descriptor = os.memfd_create("triax", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _ROOM)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _view(memory: mmap.mmap, place: int, like: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of another one that lies in memory."""
    # Its storage is no larger than itself: what counts the bytes that a step holds looks at storages.
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=place).view(like.shape)


def _host() -> str:
    """Return a name of this boot of this machine, of the namespaces in which sockets and users are, and of the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "user")]
    return " ".join(map(str, [boot, *spaces, os.geteuid()]))


def _close(sockets: list[socket.socket], process: int) -> None:
    """Close sockets, and end their connections in the process that made them: a fork of it shares them."""
    while sockets:
        each = sockets.pop()
        with contextlib.suppress(OSError):
            if os.getpid() == process:
                each.shutdown(socket.SHUT_RDWR)
        each.close()
