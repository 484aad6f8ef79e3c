"""A ``torch.optim.Optimizer`` over the replicas of a plain loop: it steps this rank's range of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..grid import Grid
from .compressor import give_back, kept_by
from .mode import Mode
from .optimizer import MakeOptimizer
from .passes import Passes, options
from .replicas import Replicas


class PassesOptimizer(torch.optim.Optimizer):
    """What ``ShardedOptimizer`` and the engine of a plain module have in common.

    Learning-rate schedulers take it for what it is; its ``param_groups`` hold the model's parameters, and its
    ``state`` is of this rank's ranges of them.

    Args:
        make: makes torch's optimizer from parameter groups.
        params: parameters, parameter groups or named parameters, as torch's optimizers take them.
        grid, mode, capacity, module, units, keep, expected: of ``Passes``.

    Attributes:
        passes: the backward passes of its steps.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        params: Iterable[Any],
        grid: Grid,
        mode: Mode,
        capacity: int,
        *,
        module: nn.Module | None,
        units: Sequence[str | nn.Module] | None = None,
        keep: bool = False,
        expected: int | None = None,
    ) -> None:
        template = make(params)  # type: ignore[arg-type]  # torch's own checks, and every group's options in full
        super().__init__(template.param_groups, template.defaults)
        del template
        self._grid = grid
        self.passes = Passes(
            self.param_groups,
            grid,
            mode,
            capacity,
            make,
            module=module,
            units=units,
            keep=keep,
            expected=expected,
        )
        self.state = self._inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """A new step: gradients are zero. Every step begins with it; ``set_to_none`` is as one likes.

        Collective where backward passes were made and no ``step`` followed: their reductions end first.
        """
        self.passes.zero()

    @torch.no_grad()
    def apply(self, scale: float, without: Collection[Tensor]) -> None:
        """Step with the reduced gradients, times ``scale``; ``without`` stand still. Collective."""
        for mine, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            its.update(options(mine))  # what schedulers, and whoever else, wrote
        self._replicas.step(scale, without=without)
        self.passes.stepped = True

    def require_known(self) -> None:
        """Refuse parameters that require gradients and did not when this was made."""
        self.passes.require_known(p for group in self.param_groups for p in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters are laid out once: give all groups when it is made."""
        if hasattr(self, "passes"):
            raise RuntimeError(
                "a ShardedOptimizer has its parameters laid out already: make it with all groups, those too whose "
                "parameters are frozen later"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shard, for this rank of an axis of this size: every rank saves its own.

        Weights are the module's: save ``module.state_dict()`` within ``zero.gathered(module)``.
        """
        for mine, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            its.update(options(mine))
        state = {**self._inner.state_dict(), "shard": self._shard(), "masters": self._masters()}
        return state if self._replicas.exchanges is None else {**state, "exchange": kept_by(self._replicas.exchanges)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` returned on this rank. Load the module's weights before, within ``zero.gathered``.

        Raises:
            ValueError: it is another rank's, or of other parameters, stages or sizes.
        """
        mine, theirs = self._shard(), state_dict.get("shard")
        if theirs != mine:
            raise ValueError(f"the state is of shard {theirs}, and this one is {mine}: load what this rank saved")
        if self._replicas.exchanges is not None:
            give_back(self._replicas.exchanges, state_dict.get("exchange"))
        self._inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for group, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(options(its))
        self.state = self._inner.state
        for master, saved in zip(self._masters(), state_dict["masters"], strict=True):
            master.copy_(saved)
        self._replicas.resume()

    @property
    def _replicas(self) -> Replicas:
        return self.passes.replicas

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """Torch's, over the ranges that this rank owns."""
        inner = self._replicas.optimizer
        assert inner is not None
        return inner

    def _shard(self) -> dict[str, Any]:
        axis = self._grid.data
        elements = [bucket.owned[1] - bucket.owned[0] for bucket in self._replicas.buckets if bucket.trained]
        return {"rank": axis.rank, "of": axis.size, "stage": self._replicas.mode.stage, "elements": elements}

    def _masters(self) -> list[Tensor]:
        """Masters that are not the weights themselves."""
        buckets = [bucket for bucket in self._replicas.buckets if bucket.master is not None]
        return [b.master.detach() for b in buckets if b.master is not None and b.master.dtype != b.shard.dtype]
