"""Batch sizes: samples per step = samples per microbatch x microbatches x replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from ..base.option_error import refusal
from .base import Options, option

RULE = "<size> = <microbatch> * <microbatches> * replicas"


class BatchSizes(NamedTuple):
    """The three batch sizes of a run: train = micro * accumulation * replicas.

    Attributes:
        train: samples per step, over all replicas.
        micro: samples per microbatch.
        accumulation: microbatches per step and replica.
    """

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True, kw_only=True)
class Batch(Options):
    """Samples of a step. Two of the three sizes determine the third; with one, ``microbatches`` is 1.

    >>> triax.Batch(size=32, microbatch=4).sizes(replicas=2)
    BatchSizes(train=32, micro=4, accumulation=4)
    """

    MAIN: ClassVar = "size"

    size: int | None = option(None, "Samples per step, over all replicas.", least=1)
    microbatch: int | Literal["auto"] | None = option(
        None,
        "Samples per microbatch of one replica. auto, beside a size: the largest that fits in memory, for a "
        "PipelineModule.",
        least=1,
    )
    microbatches: int | None = option(
        None, "Microbatches per step and replica, which fill the pipeline; None: 1.", least=1
    )
    counted: bool = option(
        True,
        "True: engine.step() updates the weights only after the last microbatch of a step. False: every engine.step() "
        "updates them, after any number of backward passes; gradients are still divided by microbatches. Not for a "
        "PipelineModule.",
    )
    labels: Literal["read", "sent"] = option(
        "read",
        "Labels of a PipelineModule's last stage. read: its ranks read the data too. sent: only the first stage's "
        "ranks read data, and they send the labels to the last stage's ranks.",
    )

    balance: bool = option(
        False,
        "Deal out the documents of a step to replicas and microbatches so that all have equal work, for a "
        "PipelineModule with NextTokenLoss and training_data of TokenData. A microbatch is then one row of any length.",
    )

    def check(self) -> None:
        """Check that the size is a multiple of the others, for some number of replicas."""
        sizes = {"microbatch": self.microbatch, "microbatches": self.microbatches}
        given = {name: value for name, value in sizes.items() if isinstance(value, int)}
        product = 1
        for value in given.values():
            product *= value
        if self.size is not None and self.size % product:
            factors = " * ".join(f"<{name}> {value}" for name, value in given.items())
            raise refusal(
                f"<size> {self.size} is no multiple of {factors}{f' = {product}' if len(given) > 1 else ''}, "
                f"for any number of replicas: change one of them ({RULE})",
            )

    def sizes(self, replicas: int) -> BatchSizes:
        """Return all three sizes for a number of replicas.

        Raises:
            OptionError: no size is given, or those given contradict each other; the message shows the product.
        """
        micro, count = None if self.microbatch == "auto" else self.microbatch, self.microbatches
        if self.size is None and micro is None:
            raise refusal(f"there is no batch size: give <size> or <microbatch> ({RULE})")
        if micro is None:
            count = count or 1
            micro = max(1, (self.size or 0) // (count * replicas))
        elif count is None:
            count = max(1, (self.size or 0) // (micro * replicas))
        unit = micro * replicas
        if self.size is not None and self.microbatches is None and self.size % unit:
            near = " or ".join(str(each * unit) for each in dict.fromkeys((count, self.size // unit + 1)))
            raise refusal(
                f"<size> {self.size} must be a multiple of <microbatch> {micro} * {replicas} replicas = {unit}: give "
                f"{near} ({RULE})"
            )
        if self.size not in (None, micro * count * replicas):
            raise refusal(
                f"<size> {self.size} is not <microbatch> {micro} * <microbatches> {count} * {replicas} replicas "
                f"= {micro * count * replicas}: change one of them, or leave <microbatches> out ({RULE})",
            )
        return BatchSizes(micro * count * replicas, micro, count)
