"""Hooks by which autograd tells that it has added to a parameter's ``.grad``.

Gradients that add up in the bucket (``direct``) need no hook in most backward passes. In a step's first pass the hook
copies them into the bucket, and in a pass that reduces the bucket it starts the reduction. In the passes between it
would cost time for each parameter and microbatch, and do nothing. So a hook is set

    bucket                        by default                           after ``watch``
    not direct                    always                               always
    direct                        in a pass that reduces the bucket    always
    direct, copied (is_copied)    in its first passes too              always
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .bucket import Bucket

Hook = Callable[[Tensor], None]


class GradientHooks:
    """Hooks of the parameters of buckets, called with each parameter after autograd has added to its ``.grad``.

    Args:
        buckets: trained buckets.
        hook: takes the gradient.
    """

    def __init__(self, buckets: Sequence[Bucket], hook: Hook) -> None:
        self._buckets, self._hook, self._watched = buckets, hook, False
        for bucket in buckets:
            if not bucket.direct:
                _set(hook, (member.parameter for member in bucket.members))

    def watch(self, before: Hook, reduced_early: Sequence[Bucket]) -> None:
        """Set a hook on all parameters.

        Args:
            before: set where the gradient need not be taken at once.
            reduced_early: buckets that are reduced in a backward pass.
        """
        self._watched = True
        for bucket in self._buckets:
            if bucket.direct:
                takes = bucket in reduced_early or bucket.is_copied
                _set(self._hook if takes else before, (member.parameter for member in bucket.members))

    @contextmanager
    def within(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context in which parameters of direct buckets have the hook."""
        handles = [] if self._watched else _set(self._hook, parameters)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _set(hook: Hook, parameters: Iterable[Tensor]) -> list[RemovableHandle]:
    return [p.register_post_accumulate_grad_hook(hook) for p in parameters if p.requires_grad]
