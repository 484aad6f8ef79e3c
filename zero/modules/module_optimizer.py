"""ZeRO's ``torch.optim.Optimizer`` for a plain module: it steps this rank's range of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from ...base.nest import map_tensors
from ...grid import Grid
from ..axis_options import ZeroOptions
from ..data_axis import ZeroDataAxis
from ..exchange_state import exchange_state_dict, load_exchange_state_dict
from ..range_stepper import OptimizerFactory
from .backward_passes import BackwardPasses, group_options


class ZeroModuleOptimizer(torch.optim.Optimizer):
    """Base of ``ShardedOptimizer`` and of the optimizer of a plain module's engine.

    Learning-rate schedulers accept this optimizer. Its ``param_groups`` hold the model's parameters, and its ``state``
    holds the optimizer state of the ranges that this rank owns.

    Args:
        factory: makes torch's optimizer from parameter groups, and names its stepper.
        params: parameters, parameter groups or named parameters, as torch's optimizers take them.
        grid, options, capacity, arguments: the arguments of ``BackwardPasses``.

    Attributes:
        backward_passes: the object that reduces gradients during the backward passes of a step.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        params: Iterable[Any],
        grid: Grid,
        options: ZeroOptions,
        capacity: int,
        **arguments: Any,
    ) -> None:
        template = factory.make(params)  # type: ignore[arg-type]  # torch's own checks, and every group's options in full
        super().__init__(template.param_groups, template.defaults)
        del template
        self._grid = grid
        self.backward_passes = BackwardPasses(self.param_groups, grid, options, capacity, factory, **arguments)
        self.state = self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, with zero gradients. Every step begins with it; ``set_to_none`` has no effect.

        Collective if backward passes ran since the last ``step``, because their reductions must end first.
        """
        self.backward_passes.reset()

    def apply(self, scale: float, without: Collection[Tensor]) -> None:
        """Step with the reduced gradients times ``scale``; the parameters in ``without`` do not change. Collective."""
        self._update_inner_options()
        self._data_axis.step(scale, without=without)
        self._show_inner_options()
        self.backward_passes.mark_stepped()

    def train(self) -> None:
        """Switch to the weights that are trained, if the optimizer has modes (schedule-free ones). Collective."""
        self._switch_mode("train")

    def eval(self) -> None:
        """Switch to the weights that are evaluated and saved, if the optimizer has modes. Collective."""
        self._switch_mode("eval")

    def _switch_mode(self, mode: str) -> None:
        self._update_inner_options()
        self._data_axis.switch_mode(mode)
        self._show_inner_options()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse ``torch.amp.GradScaler.step``, which reads this first."""
        raise RuntimeError(
            f"torch.amp.GradScaler unscales .grad, but {type(self).__name__} steps with the gradients in ZeRO's "
            "buckets: make triax.Engine(model, precision='fp16'), whose engine.backward(loss) and engine.step() scale "
            "the loss, or use bf16, which needs no loss scale, and leave out the scaler"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``RuntimeError``: parameters are laid out in buckets once, when the optimizer is made."""
        if hasattr(self, "backward_passes"):
            raise RuntimeError(
                "the optimizer's parameters are laid out in buckets already: make it with all groups, also those whose "
                "parameters are frozen later"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state and master weights of this rank's shard.

        Every rank saves its shard, which only the same rank of a data axis of the same size can load. The module's
        weights are not included. To save them, call ``module.state_dict()`` within ``zero.gathered(module)``.
        """
        self._update_inner_options()
        self._data_axis.written.take()
        state = {**self.inner.state_dict(), "shard": self._shard(), "masters": self._masters(), "names": self._names()}
        if self._data_axis.exchange is not None:
            state["exchange"] = exchange_state_dict(self._data_axis.exchange)
        if (late := self._data_axis.stepper.late) is not None:
            state["late"] = [(i, late.numbers[p]) for i, p in enumerate(self._stepped()) if p in late.numbers]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on this rank. Load the module's weights before, within ``zero.gathered``.

        Raises:
            ValueError: the state was saved by another rank, or with other parameters, another order of them, another
                stage or another size of the data axis.
        """
        shard, saved_shard = self._shard(), state_dict.get("shard")
        names = self._names()
        saved_names = state_dict.get("names", names)
        unlike = sorted(set(names) ^ set(saved_names))
        if unlike:
            there = "were" if unlike[0] in saved_names else "were not"
            raise ValueError(
                f"the trained parameters differ from the saved ones in {len(unlike)}: {', '.join(unlike[:8])}. The "
                f"first {there} trained when the state was saved. Make the optimizer while all of them require "
                "gradients, and freeze them afterwards, which keeps their state"
            )
        if saved_shard != shard:
            raise ValueError(
                f"the state was saved of shard {saved_shard}, but this rank has shard {shard}: load what this rank "
                "saved, with the same parameters, stage and number of replicas"
            )
        for name, saved_name in zip(names, saved_names, strict=True):
            if name != saved_name:
                raise ValueError(
                    f"the parameters have another order than the saved ones: {name} has the place of {saved_name}. "
                    "Make the optimizer with the parameters in the order in which they were when the state was saved"
                )
        if self._data_axis.exchange is not None:
            load_exchange_state_dict(self._data_axis.exchange, state_dict.get("exchange"))
        own = ("shard", "masters", "names", "exchange", "late")
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key not in own})
        self._show_inner_options()
        self.state = self.inner.state
        # torch has rounded all but ``step`` to the dtype of what is stepped, but the optimizer may keep another one.
        masters = (master for group in self.inner.param_groups for master in group["params"])
        for index, master in enumerate(masters):
            for key, value in state_dict["state"].get(index, {}).items():
                if key != "step":
                    self.state[master][key] = map_tensors(methodcaller("to", master.device), value)
        for master, saved in zip(self._masters(), state_dict["masters"], strict=True):
            master.copy_(saved)
        if (late := self._data_axis.stepper.late) is not None:
            parameters = self._stepped()
            late.numbers = {parameters[index]: numbers for index, numbers in state_dict.get("late", ())}
        self._data_axis.stepper.resume(at_synchronization=False)

    def _update_inner_options(self) -> None:
        """Copy to torch's optimizer what learning-rate schedulers or the user changed in the groups since its step."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(group_options(group))

    def _show_inner_options(self) -> None:
        """Copy to the groups what torch's optimizer keeps in its own: counters, a rate that it has changed."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(group_options(inner))

    @property
    def _data_axis(self) -> ZeroDataAxis:
        return self.backward_passes.data_axis

    @property
    def inner(self) -> torch.optim.Optimizer:
        """Torch's optimizer over the ranges that this rank owns."""
        return self._data_axis.stepper.optimizer

    def _shard(self) -> dict[str, Any]:
        axis = self._grid.data_context
        elements = [bucket.owned[1] - bucket.owned[0] for bucket in self._data_axis.buckets if bucket.trained]
        return {"rank": axis.rank, "of": axis.size, "stage": self._data_axis.options.stage, "elements": elements}

    def _names(self) -> list[str]:
        """Return the names of the parameters that are trained, where they are known."""
        buckets = (bucket for bucket in self._data_axis.buckets if bucket.trained)
        return [member.layout.name for bucket in buckets for member in bucket.members]

    def _stepped(self) -> list[nn.Parameter]:
        buckets = (bucket for bucket in self._data_axis.buckets if bucket.trained)
        return [member.parameter for bucket in buckets for member in bucket.members]

    def _masters(self) -> list[Tensor]:
        """Return the master weights of the buckets whose master is a copy in another dtype than the weights."""
        return [
            bucket.master.detach()
            for bucket in self._data_axis.buckets
            if bucket.master is not None and bucket.master.dtype != bucket.shard.dtype
        ]


class ModuleOptimizer(ZeroModuleOptimizer):
    """Optimizer of a ``ModuleEngine``, over ZeRO's shards, with the interface of a torch optimizer.

    Users and learning-rate schedules read and set its parameter groups and state, and call ``zero_grad``. Only the
    engine may call ``step``.

    Attributes:
        prepared: what the engine sets before each ``step``: the factor of the reduced gradients, and the parameters
            that are not updated. They are no arguments of ``step``, because learning-rate schedules and other libraries
            wrap it.
    """

    prepared: tuple[float, set[Tensor]] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Run the optimizer with the reduced gradients. Only the engine calls this method. Collective.

        Raises:
            RuntimeError: if other code calls it, because the gradients would be neither reduced nor divided.
        """
        if self.prepared is None:
            raise RuntimeError(
                "the engine has to reduce and clip the gradients before the optimizer steps: call engine.step(), not "
                "optimizer.step()"
            )
        (factor, without), self.prepared = self.prepared, None
        self.apply(factor, without)
