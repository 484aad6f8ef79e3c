"""``.grad`` of the parameters of a bucket, as user code may read and change it between two backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from weakref import ref

import torch
from torch import Tensor, nn

from .flat import Slot
from .gradient_buffer import GradientBuffer
from .guarded_gradient import GradientReader, GuardedGradient, HiddenGradient, guard
from .managed import ManagedParameter


class GradientState(IntEnum):
    """State of one parameter's gradient in one step, as user code can see and change it.

    state       ``.grad``                 gradient of this step
    ABSENT      None                      none so far on this rank
    PRESENT     set by the bucket         the sum of the backward passes, or zeros on a rank that had no gradient
    CLEARED     set by the bucket         0: user code has set it to zero since the last backward pass
    ASSIGNED    set by the bucket again   the tensor that user code had put into ``.grad``
    DROPPED     None, or hidden zeros     0: user code had set ``.grad`` to None. The optimizer leaves the parameter out

    Each event can happen in each state. The next state, as in ``TRANSITIONS``:

    event       what happens                             ABSENT    PRESENT   CLEARED   ASSIGNED  DROPPED
    add         a backward pass has given a gradient     PRESENT   PRESENT   PRESENT   ASSIGNED  PRESENT
    fill        zeros are sent for a missing gradient    PRESENT   PRESENT   CLEARED   ASSIGNED  DROPPED
    vanish      other replicas have had none either      ABSENT    ABSENT    ABSENT    ASSIGNED  DROPPED
    pass        another backward pass begins             ABSENT    PRESENT   PRESENT   ASSIGNED  DROPPED
    zero        user code sets the gradient to zero      ABSENT    CLEARED   CLEARED   ASSIGNED  DROPPED
    drop        user code sets ``.grad`` to None         DROPPED   DROPPED   DROPPED   DROPPED   DROPPED
    assign      user code sets ``.grad`` to a tensor     ASSIGNED  ASSIGNED  ASSIGNED  ASSIGNED  ASSIGNED

    A step begins with all gradients ABSENT. The events come from ``Bucket``: ``add`` from ``take_gradient`` and
    ``target``, ``fill`` from ``fill_in``, ``vanish`` from ``expose``, ``pass`` from ``begin_pass``, ``zero`` and
    ``drop`` from ``discard``, and ``assign`` from ``assign_gradient``.
    """

    ABSENT = 0
    PRESENT = 1
    CLEARED = 2
    ASSIGNED = 3
    DROPPED = 4


ABSENT, PRESENT, CLEARED, ASSIGNED, DROPPED = GradientState
# Event -> the state after it, for each state before it.
TRANSITIONS: dict[str, tuple[GradientState, ...]] = {
    "add": (PRESENT, PRESENT, PRESENT, ASSIGNED, PRESENT),
    "fill": (PRESENT, PRESENT, CLEARED, ASSIGNED, DROPPED),
    "vanish": (ABSENT, ABSENT, ABSENT, ASSIGNED, DROPPED),
    "pass": (ABSENT, PRESENT, PRESENT, ASSIGNED, DROPPED),
    "zero": (ABSENT, CLEARED, CLEARED, ASSIGNED, DROPPED),
    "drop": (DROPPED,) * 5,
    "assign": (ASSIGNED,) * 5,
}


class ShownGradients:
    """``.grad`` of the parameters of one bucket, and the state of each gradient.

    ``.grad`` of a gradient in the bucket is

    - its view there, if there is no ``access`` or it is ``plain``, or a guard over this view, to which autograd adds;
    - a hidden guard, while the gradients are reduced, and always if the bucket is not ``direct``: autograd could then
      not add to the bucket's memory;
    - None, without an access, if the bucket is not direct.

    Without an access no user code runs within a step, and all states stay ABSENT.

    Args:
        members: the parameters of the bucket.
        slots: their places in the bucket.
        direct: as in ``Bucket``.

    Attributes:
        access: access of user code to ``.grad``, which is not kept alive; None if user code does not run between
            backward passes.
    """

    def __init__(self, members: Sequence[ManagedParameter], slots: Sequence[Slot], direct: bool) -> None:
        self._members, self._slots, self._direct = members, slots, direct
        self._access: ref[GradientReader] | None = None
        # By id: the hash of a tensor is a call into Python, for each parameter and microbatch.
        self._states: dict[int, GradientState] = {}  # without those that are ABSENT since the step began
        self._discarded: set[int] = set()  # parameters whose gradient user code has zeroed or dropped in this step
        self._hidden: dict[int, HiddenGradient] = {}  # made once for each parameter
        self._hides = False  # all gradients are hidden, from their reduction to the next backward pass
        self._makes_room = False  # the running backward pass began with None in place of hidden gradients

    @property
    def access(self) -> GradientReader | None:
        return None if self._access is None else self._access()

    @access.setter
    def access(self, access: GradientReader) -> None:
        self._access = ref(access)

    def state(self, parameter: Tensor) -> GradientState:
        """Return the state of a parameter's gradient."""
        return self._states.get(id(parameter), ABSENT)

    def having(self, state: GradientState) -> set[Tensor]:
        """Return the parameters whose gradients have a state."""
        some = state in self._states.values()
        return {m.parameter for m in self._members if self.state(m.parameter) is state} if some else set()

    def begin(self) -> None:
        """Begin a step: no parameter has a gradient."""
        self._states.clear()
        self._discarded.clear()
        self._hides = False
        for hidden in self._hidden.values():
            hidden.added = None
        for member in self._members:
            member.parameter.grad = None

    def take(self, parameter: Tensor, buffer: GradientBuffer | None) -> Tensor | None:
        """Return what autograd, or user code, has left in ``.grad`` for the bucket to take; None if nothing."""
        gradient = parameter.grad
        if isinstance(gradient, HiddenGradient):
            added, gradient.added = gradient.added, None
            return added
        if gradient is None or isinstance(gradient, GuardedGradient):
            return None
        is_view = self._direct and buffer is not None and gradient is buffer.views.get(parameter)
        return None if is_view else gradient

    def show(self, parameter: Tensor, buffer: GradientBuffer, event: str = "add") -> None:
        """Set ``.grad`` of a gradient that is in the buffer, after the event ``add`` or ``fill``."""
        access = self.access
        if access is not None:
            number = id(parameter)
            self._states[number] = TRANSITIONS[event][self._states.get(number, ABSENT)]
        if self._direct:
            self._set(parameter, buffer, access)
        else:
            parameter.grad = None if access is None else self._hidden_of(parameter, access)

    def vanish(self, parameter: Tensor) -> None:
        """Show no gradient: what ``fill`` has shown is zero on all replicas."""
        self.note(parameter, "vanish")
        if self.state(parameter) is not ASSIGNED:
            parameter.grad = None

    def hide(self, access: GradientReader) -> None:
        """Hide all gradients: nothing may read or change them."""
        self._hides = True
        for member in self._members:
            member.parameter.grad = self._hidden_of(member.parameter, access)

    def begin_pass(self, buffer: GradientBuffer | None, first: Tensor | None) -> list[Tensor]:
        """Let autograd add to ``.grad`` again: a backward pass begins.

        Args:
            buffer: the bucket's gradients.
            first: a parameter to whose ``.grad`` the pass has added already, if it was first seen by that.

        Returns:
            The parameters whose ``.grad`` user code has set to None.

        Raises:
            RuntimeError: user code has assigned a gradient between two backward passes.
        """
        access = self.access
        unset: list[Tensor] = []
        if access is None or not self._states:
            return unset
        self._hides = False
        for member in self._members:
            parameter, gradient = member.parameter, member.parameter.grad
            if isinstance(gradient, HiddenGradient):
                if gradient.added is None:
                    parameter.grad, self._makes_room = None, True
                    if self._direct and buffer is not None and parameter not in buffer.empty:
                        self._set(parameter, buffer, access)
            elif isinstance(gradient, GuardedGradient) or not self._is_shown(parameter):
                pass
            elif gradient is None or parameter is first:
                unset.append(parameter)
            elif not (access.plain or (buffer is not None and gradient is buffer.views.get(parameter))):
                raise RuntimeError(
                    f"p.grad of {member.layout.name} was assigned between two backward passes of a step, but the "
                    "gradient that the step takes lies elsewhere: change it after the last one"
                )
        self._states = {number: TRANSITIONS["pass"][state] for number, state in self._states.items()}
        return unset

    def end_pass(self) -> None:
        """Hide those gradients again to which the backward pass has not added: user code has not set them to None."""
        if self._makes_room:
            self._makes_room = False
            for member in self._members:
                if self.is_unset(member.parameter):
                    self.put_back(member.parameter, None)

    def is_unset(self, parameter: Tensor) -> bool:
        """Return True if user code has set ``.grad`` to None, of a gradient that was shown."""
        return parameter.grad is None and self._is_shown(parameter)

    def note(self, parameter: Tensor, event: str) -> None:
        """Change the state of a gradient after an event."""
        number = id(parameter)
        if event in ("zero", "drop"):
            self._discarded.add(number)
        self._states[number] = TRANSITIONS[event][self._states.get(number, ABSENT)]

    def put_back(self, parameter: Tensor, buffer: GradientBuffer | None) -> None:
        """Set ``.grad`` to what it was before user code has replaced it."""
        access = self.access
        assert access is not None
        if not self._is_shown(parameter):
            parameter.grad = None
        elif self._hides or buffer is None or not self._direct:
            parameter.grad = self._hidden_of(parameter, access)
        else:
            self._set(parameter, buffer, access)

    def replaced(self, buffer: GradientBuffer | None) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield parameters whose ``.grad`` user code has replaced after the last backward pass, and what it is now."""
        flat = None if buffer is None else buffer.flat
        base, size = (0, 1) if flat is None else (flat.data_ptr(), flat.element_size())
        for slot, member in zip(self._slots, self._members, strict=True):
            parameter, gradient = member.parameter, member.parameter.grad
            if isinstance(gradient, GuardedGradient):
                continue
            if gradient is None:
                if self._is_shown(parameter):
                    yield parameter, None
            elif (
                flat is None
                or gradient.layout != torch.strided
                or (slot.stop > slot.start and gradient.data_ptr() != base + slot.start * size)
            ):
                yield parameter, gradient

    def kept(self) -> Iterator[bool]:
        """Yield for each parameter that had a gradient: True if it has one, and False if user code has discarded it."""
        for parameter in (member.parameter for member in self._members if self._is_shown(member.parameter)):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, GuardedGradient):
                yield gradient is not None and self.state(parameter) is not CLEARED
            else:
                yield bool(gradient.any())  # no guard has seen a zero_()

    def expose(self, gradient_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Set ``.grad`` to the reduced gradients, which user code reads and changes without a guard."""
        for member in self._members if self._direct else ():
            if isinstance(member.parameter.grad, GuardedGradient):
                member.parameter.grad = gradient_of(member.parameter)

    def conceal(self, buffer: GradientBuffer) -> None:
        """Undo ``expose``."""
        access = self.access
        for member in self._members if self._direct else ():
            if member.parameter.grad is not None:
                self._set(member.parameter, buffer, access)

    def changes(self) -> float:
        """Return a number that differs between replicas whose user code has discarded different gradients."""
        parameters = [member.parameter for member in self._members]
        codes = [(self.state(p) is DROPPED) + 2 * (id(p) in self._discarded) for p in parameters]
        return float(sum(number * code for number, code in enumerate(codes, start=1)))

    def _is_shown(self, parameter: Tensor) -> bool:
        """Return True if ``.grad`` was set here, so that None or another tensor in it is user code's doing."""
        return self.state(parameter) not in (ABSENT, DROPPED)

    def _set(self, parameter: Tensor, buffer: GradientBuffer, access: GradientReader | None) -> None:
        """Set ``.grad`` to memory of the buffer, in which autograd accumulates."""
        if access is None or access.plain:
            parameter.grad = buffer.views[parameter]
        else:
            made = buffer.guards.get(parameter)
            if made is None:
                made = guard(buffer.views[parameter].as_subclass(GuardedGradient), access, parameter)
                buffer.guards[parameter] = made
            parameter.grad = made

    def _hidden_of(self, parameter: Tensor, access: GradientReader) -> HiddenGradient:
        made = self._hidden.get(id(parameter))
        if made is None:
            made = self._hidden[id(parameter)] = guard(HiddenGradient(parameter), access, parameter)
        return made
