"""Reading of other libraries' pickled files without their code: every class in them becomes an ``Inert`` record.

read_pickle       a raw pickle, such as the file ``.metadata`` of torch.distributed.checkpoint
read_torch_file   a file of ``torch.save``, by torch's restricted reader

``read_pickle`` walks over the operations that ``pickletools`` lists. Operations that call a function or make an object
make a record of the name and the arguments instead, so that nothing that is in the file can run.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Inert:
    """Record of an object in a pickle: what would have been called or made, and with what.

    Attributes:
        name: name of the class or function, such as ``argparse.Namespace``; empty in a file of ``torch.save``.
        args: arguments.
        state: attributes of the object, or what it set its state from.
    """

    name = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> Inert:
        """Make a record of a call with these arguments."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute of the recorded object, or the default."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"{self.name or 'object'}{self.args!r}"


def read_torch_file(file: Path | bytes) -> Any:
    """Return the content of a file of ``torch.save``: tensors, numbers, text, and ``Inert`` in place of other objects.

    Args:
        file: path, whose tensors stay on the disk until they are read; or the file's bytes.

    Raises:
        ValueError: the file cannot be read.
    """
    source: Any = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if isinstance(file, bytes):
            source.seek(0)
        with torch.serialization.safe_globals([(Inert, name) for name in unknown]):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    except Exception as error:  # of torch's reader, of zip files, of the disk
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"{'a tensor' if isinstance(file, bytes) else file} cannot be read: {said}") from error


def read_pickle(data: bytes) -> Any:
    """Return the content of a pickle: numbers, text, tuples, lists, dicts, sets, and ``Inert`` in place of the rest.

    Raises:
        ValueError: the data is not a pickle, or has an operation that this reader does not have.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    mark = object()

    def marked() -> list[Any]:
        """Remove and return what is above the last mark."""
        at = max(i for i, value in enumerate(stack) if value is mark)
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def made(name: Any, *args: Any) -> Inert:
        record = Inert(*args)
        record.name = name.name if isinstance(name, Inert) else str(name)
        return record

    def pairs(values: list[Any]) -> dict[Any, Any]:
        return dict(zip(values[::2], values[1::2], strict=True))

    def build() -> None:
        state = stack.pop()
        if isinstance(stack[-1], Inert):
            stack[-1].state = state

    def setitems(values: list[Any]) -> None:
        if isinstance(stack[-1], dict):
            stack[-1].update(pairs(values))

    def extend(values: list[Any]) -> None:
        if isinstance(stack[-1], list):
            stack[-1].extend(values)
        elif isinstance(stack[-1], set):
            stack[-1].update(values)

    def popped(count: int) -> list[Any]:
        values = stack[-count:]
        del stack[-count:]
        return values

    acts: dict[str, Callable[[Any], object]] = {
        "PROTO": lambda arg: None,
        "FRAME": lambda arg: None,
        "STOP": lambda arg: None,
        "MARK": lambda arg: stack.append(mark),
        "POP": lambda arg: stack.pop(),
        "POP_MARK": lambda arg: marked(),
        "DUP": lambda arg: stack.append(stack[-1]),
        "NONE": lambda arg: stack.append(None),
        "NEWTRUE": lambda arg: stack.append(True),
        "NEWFALSE": lambda arg: stack.append(False),
        "EMPTY_TUPLE": lambda arg: stack.append(()),
        "EMPTY_LIST": lambda arg: stack.append([]),
        "EMPTY_DICT": lambda arg: stack.append({}),
        "EMPTY_SET": lambda arg: stack.append(set()),
        "TUPLE": lambda arg: stack.append(tuple(marked())),
        "TUPLE1": lambda arg: stack.append(tuple(popped(1))),
        "TUPLE2": lambda arg: stack.append(tuple(popped(2))),
        "TUPLE3": lambda arg: stack.append(tuple(popped(3))),
        "LIST": lambda arg: stack.append(marked()),
        "DICT": lambda arg: stack.append(pairs(marked())),
        "FROZENSET": lambda arg: stack.append(frozenset(marked())),
        "APPEND": lambda arg: extend(popped(1)),
        "APPENDS": lambda arg: extend(marked()),
        "ADDITEMS": lambda arg: extend(marked()),
        "SETITEM": lambda arg: setitems(popped(2)),
        "SETITEMS": lambda arg: setitems(marked()),
        "GLOBAL": lambda arg: stack.append(made(arg.replace(" ", "."))),
        "STACK_GLOBAL": lambda arg: stack.append(made(".".join(map(str, popped(2))))),
        "REDUCE": lambda arg: stack.append((lambda pair: made(pair[0], *pair[1]))(popped(2))),
        "NEWOBJ": lambda arg: stack.append((lambda pair: made(pair[0], *pair[1]))(popped(2))),
        "NEWOBJ_EX": lambda arg: stack.append((lambda three: made(three[0], *three[1]))(popped(3))),
        "BUILD": lambda arg: build(),
        "MEMOIZE": lambda arg: memo.__setitem__(len(memo), stack[-1]),
        **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda arg: memo.__setitem__(int(arg), stack[-1])),
        **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda arg: stack.append(memo[int(arg)])),
    }
    try:
        for operation, arg, _ in pickletools.genops(data):
            if operation.name in acts:
                acts[operation.name](arg)
            elif arg is not None and not operation.stack_before:  # a number, a text or bytes
                stack.append(arg)
            else:
                raise ValueError(f"it has the operation {operation.name}")
        (unpickled,) = stack
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the pickle cannot be read, because {error}") from error
    return unpickled
