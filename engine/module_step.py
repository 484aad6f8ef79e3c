"""State of a step of a plain module: its place in the step, what the calls of a microbatch did, and the losses so far.

forward  backward  step  | forward  backward  step  | ... | forward  backward  step: the weights change
MicrobatchCalls            MicrobatchCalls                  MicrobatchCalls
StepLosses ------------------------------------------------------------------------
MicrobatchCount: done 0    done 1                           is_last               in_update
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from ..base.errors import AgreedError
from ..grid.loss_terms import NamedLosses, described_form
from .auxiliary_steps import AuxiliarySteps


@dataclass
class MicrobatchCount:
    """Place of the present microbatch in its step.

    Attributes:
        microbatches: microbatches of a step, by which its gradients are divided.
        counted: the step ends after so many; otherwise with each ``step()``.
        foresees: a backward pass of the last microbatch is the step's last one, and may complete its reductions. If
            not, ``step()`` completes them.
        said_last: what user code last said of its microbatches, in place of the count; None: nothing.
        done: microbatches of this step that are done.
        in_no_sync: within ``no_sync``, where no gradients are reduced.
        in_update: ``step()`` changes the weights.
    """

    microbatches: int
    counted: bool
    foresees: bool
    said_last: bool | None = None
    done: int = 0
    in_no_sync: bool = False
    in_update: bool = False

    @property
    def is_last(self) -> bool:
        """True if the present microbatch is the step's last one."""
        if self.said_last is not None:
            return self.said_last
        return not self.counted or self.done + 1 >= self.microbatches

    def pass_is_last(self) -> bool:
        """Return True if the backward pass of the present microbatch is to complete the step's reductions."""
        return self.foresees and self.is_last and not self.in_no_sync

    def end(self, ends_step: bool) -> None:
        """Go on to the next microbatch, which is the first one of a step if this one ends its step."""
        self.done = 0 if ends_step else self.done + 1
        self.in_update = False


@dataclass
class MicrobatchCalls:
    """Calls since the last ``step()``. The next ``step()`` makes a microbatch of them.

    Attributes:
        forwards: forward passes in train mode, with a graph.
        backwards: backward passes that ``engine.backward`` made.
        scaled: the loss went through ``engine.scale``.
        opaque: an output is no nest of tensors, so that its gradients cannot be scaled.
        opaque_in_eval: likewise in eval mode, where no backward pass needs to follow.
        entered: a backward pass entered through outputs, which scaled its gradients.
    """

    forwards: int = 0
    backwards: int = 0
    scaled: bool = False
    opaque: bool = False
    opaque_in_eval: bool = False
    entered: bool = False

    def lacks_scale(self, backwards: int, fp16: bool) -> bool:
        """Return True if gradients of ``loss.backward()`` were not multiplied by the loss scale.

        Args:
            backwards: backward passes that user code made on a loss.
            fp16: this engine has a loss scaler.
        """
        unseen = self.opaque or (self.opaque_in_eval and not self.entered and fp16)
        return unseen and not self.scaled and backwards > 0


@dataclass
class StepLosses:
    """Losses of this step's microbatches, as ``engine.backward`` was given them.

    Attributes:
        auxiliary: the losses within the module, and the loads of its experts.
        values: the losses, divided by the number of microbatches.
        named: those that have names.
    """

    auxiliary: AuxiliarySteps
    values: list[Tensor | float] = field(default_factory=list)
    named: list[NamedLosses] = field(default_factory=list)

    def take(self) -> StepLosses:
        """Return the losses of the step, which ends, and go on without losses."""
        taken = replace(self)
        self.values, self.named = [], []
        return taken

    def forget(self, passes: int) -> None:
        """Forget the step's backward passes, because user code has discarded their gradients.

        Args:
            passes: number of backward passes so far, in all steps.
        """
        self.take()
        self.auxiliary.discard(passes)

    def require_form(self, terms: NamedLosses) -> None:
        """Check that a microbatch has the terms and metrics of those before it."""
        if self.named and terms.form() != self.named[0].form():
            raise AgreedError(
                f"engine.backward(loss) was given {described_form(terms.form())}, and before, in the same step, "
                f"{described_form(self.named[0].form())}: give the same names in every microbatch"
            )
