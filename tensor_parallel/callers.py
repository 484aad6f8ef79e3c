"""Code that asks for an operation on a tensor, found by the frames of the stack.

    loss.py, package of the user       y = F.linear(x, layer.weight)       <- asking_frame()
    torch/nn/functional.py             code of torch runs what its caller asks
    outside.py, callers.py             the guard of the weight

Some modules of torch ask of their own accord, such as an optimizer or a printed tensor: then the frame is theirs.
"""

from __future__ import annotations

import sys
from types import FrameType

from ..base.uncompiled import uncompiled

PACKAGE = __name__.partition(".")[0]
# Modules of torch that read parameters for a purpose of their own. Other code of torch only runs what its caller asks.
_OWN_ACCORD = (
    *("torch.optim", "torch.distributed", "torch.amp", "torch.serialization", "torch._tensor_str", "torch.nn.init"),
    *("torch.nn.modules.module", "torch.nn.utils.clip_grad"),
)
_CALLS = ("_call_impl", "_wrapped_call_impl", "inner")  # of torch.nn.modules.module, for the caller of a module
# Modules whose frames lie between an operation and its caller.
_GUARDS = (__name__, __name__.replace("callers", "outside"), uncompiled.__module__)


def module_of(frame: FrameType | None) -> str:
    """Return the name of a frame's module."""
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def package_of(frame: FrameType | None) -> str:
    """Return the package of a frame's module."""
    return module_of(frame).partition(".")[0]


def calling_module() -> str:
    """Return the name of the module that calls an operation, be it torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_of(frame).startswith((*_GUARDS, "torch._dynamo")):
        frame = frame.f_back
    return module_of(frame)


def asking_frame() -> FrameType | None:
    """Return the frame of the code that asks for an operation, behind the code of torch that runs it for that."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = module_of(frame)
        of_own_accord = name.startswith(_OWN_ACCORD) and frame.f_code.co_name not in _CALLS
        if name not in _GUARDS and (of_own_accord or package_of(frame) != "torch"):
            break
        frame = frame.f_back
    return frame
