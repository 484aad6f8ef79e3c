"""Reading a checkpoint on any grid: each rank reads the parts of the boxes that overlap its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..base.dtypes import TORCH_NAMES
from ..grid import Grid
from ..grid.agreement.agreement import agreed
from ..grid.ranges import shape_of
from .format import folder as folders
from .format.index import NAME, Index, read_index
from .format.remote import Folder
from .snapshot import BUFFERS, CLIENT, EXCHANGE, OPTIMIZER, OUTER, RANDOM, REPLICA, WEIGHTS, Snapshot, TensorBox


@dataclass(frozen=True)
class LoadOptions:
    """The parts of a checkpoint to load.

    Attributes:
        strict: require the names and shapes of the model. If False, only tensors that match are loaded.
        optimizer: load the optimizer's state, the options of its parameter groups and the loss scale.
        schedule: load the learning-rate schedule.
        weights_only: load only weights and buffers, without optimizer state, schedule, counters and data position.
        verify: compare the bytes that are read with their checksums before anything is loaded.
        local: load the state of each replica of a run with local updates.
    """

    strict: bool = True
    optimizer: bool = True
    schedule: bool = True
    weights_only: bool = False
    verify: bool = True
    local: bool = False

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of tensors that are read."""
        if self.weights_only:
            return (WEIGHTS, BUFFERS, CLIENT)
        optimizer = (OPTIMIZER, EXCHANGE) if self.optimizer else ()
        return (WEIGHTS, BUFFERS, CLIENT, RANDOM, *optimizer, *((REPLICA, OUTER) if self.local else ()))


class Reader:
    """An open checkpoint.

    Args:
        path: path of the checkpoint's folder.
        index: the checkpoint's index.

    Attributes:
        snapshot: the checkpoint's tensors and header. A tensor's values are read from the files at its first use,
            through a memory map.
    """

    def __init__(self, path: Folder, index: Index) -> None:
        self.path, self.index = path, index
        self._folder = index.folder(path)
        head = dict(index.head)
        self.snapshot = Snapshot(
            numbers=head.pop("numbers", {}), header=head | {"checksum": index.checksum}, source=str(path)
        )
        for name, entry in index.tensors.items():
            tensor = self.snapshot.declare(name, entry.shape, TORCH_NAMES[entry.dtype])
            for box, file, _, span in entry.boxes:
                load = partial(self._folder.tensor, file, span, tensor.dtype, shape_of(box))
                tensor.boxes.append(TensorBox(box, load))

    def verify(self, kinds: Sequence[str], rank: int, size: int) -> None:
        """Compare this rank's share of the files' bytes with their checksums. All ranks together read each byte once.

        Args:
            kinds: kinds of tensors to check, as ``Index.byte_ranges``.
            rank, size: this rank, and the number of ranks that share the work.

        Raises:
            CorruptError: naming the file, the tensor and the bytes.
        """
        ranges = self.index.byte_ranges(kinds)
        total = sum(span.stop - span.start for _, span, _ in ranges)
        at = 0
        for file, span, name in ranges:
            if at * size // max(total, 1) == rank:
                self.index.check_range(self._folder, file, span, name)
            at += span.stop - span.start


def open_checkpoint(grid: Grid, path: Folder, options: LoadOptions) -> Snapshot:
    """Open a checkpoint, and compare what will be loaded with its checksums. Collective.

    Raises:
        DamagedError: on every rank: bytes are not those that were written.
        CheckpointError: on every rank: there is no checkpoint.
    """
    with agreed(grid):
        try:
            reader = Reader(path, read_index(path))
        except FileNotFoundError:
            near = folders.names(path.parent)
            raise ValueError(
                f"{path} is not a checkpoint, because it has no index.json. Give the path of a checkpoint's folder. "
                f"The folders in {path.parent} are: {', '.join(near) or 'none'}"
            ) from None
        except OSError as error:
            raise ValueError(f"{path / NAME} cannot be read: {error.strerror}") from error
        if grid.rank == 0:
            folders.check_place(path, reader.index)
        if options.verify:
            reader.verify(options.kinds(), grid.rank, grid.size)
    return reader.snapshot
