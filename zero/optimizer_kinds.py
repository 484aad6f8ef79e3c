"""A trial of an optimizer: which parts of the parameters it can step by itself, and which stepper it gets.

It steps two small tensors, a and b, by several optimizers of its class, each over some parts of them. Half way, the
state moves from the parts of one cut to those of another, as by a checkpoint.

    cut        parts                     the weights are those of plain PyTorch if the update of an element depends on
    --------   -----------------------   -----------------------------------------------------------------------------
    plain      one optimizer, [a] [b]    everything: this is plain PyTorch
    shards     [a and b[ ]rest of b]     the element alone: then ZeRO may cut anywhere (``RangeStepper``)
    tensors    [a] / [b]                 its tensor: each replica has to step whole tensors (``WholeStepper``)
    together   [a] [b] / nothing         all tensors: each rank has to step the whole model

Torch's own optimizers and triax's are known, and not tried.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.json_values import decode, encode
from ..grid import Grid
from ..grid.agreement.agreement import agreed
from .axis_options import ZeroOptions
from .managed import ManagedParameter
from .optimizer_entries import group_entries, load_own_entries, own_entries
from .optimizer_state import in_training, is_elementwise, is_number
from .protocols import MakeOptimizer
from .range_stepper import ELEMENTWISE, OptimizerFactory, RangeStepper
from .whole_tensors import WholeStepper

_PACKAGE = __name__.partition(".")[0]
_SIZE = 2 * 72 * 64  # each part has more than the 4,096 elements below which some optimizers keep other state
_STEPS = 8

_DEPENDS = "{} depend on all elements that it steps together"

Cut = list[list[tuple[int, int, tuple[int, ...]]]]  # for each optimizer: first and last element, and shape, of parts
_A_AND_B: list[tuple[int, int, tuple[int, ...]]] = [(0, _SIZE // 2, (72, 64)), (_SIZE // 2, _SIZE, (64, 72))]
_PLAIN: Cut = [_A_AND_B]
_SHARDS: Cut = [[(0, 4900, (4900,))], [(4900, _SIZE, (_SIZE - 4900,))]]
_FLAT: Cut = [[(0, _SIZE, (_SIZE,))]]
_TENSORS: Cut = [[part] for part in _A_AND_B]


class OptimizerKind(NamedTuple):
    """Result of a trial.

    Attributes:
        name: the optimizer's class.
        whole: None, ``"tensors"`` or ``"model"``: what one rank has to step by itself.
        reason: why it cannot step less.
        draws: True if the update draws random numbers.
    """

    name: str
    whole: str | None
    reason: str = ""
    draws: bool = False


def choose_stepper(
    factory: OptimizerFactory,
    members: Sequence[ManagedParameter],
    groups: Sequence[Mapping[str, Any]],
    grid: Grid,
    options: ZeroOptions,
) -> type[RangeStepper]:
    """Return the stepper of an optimizer on this grid. Collective if it needs whole tensors.

    Raises:
        ConfigError: on every rank, if the optimizer needs more of the parameters than a rank has, or if a checkpoint
            could not hold its state.
    """
    if factory.stepper is not RangeStepper or (factory.kind is not None and is_known(factory.kind)):
        return factory.stepper
    dtypes = [options.accumulation_dtype, *(member.parameter.dtype for member in members), torch.get_default_dtype()]
    device = torch.device("cpu") if grid.device.type == "meta" else grid.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        kind = kind_of(
            factory.make,
            groups,
            next(dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point),
            device,
        )
    if kind.whole is None:
        return RangeStepper
    with agreed(grid, ConfigError):
        _require_whole(kind, members, grid, options)
    return WholeStepper


def _require_whole(kind: OptimizerKind, members: Sequence[ManagedParameter], grid: Grid, options: ZeroOptions) -> None:
    """Check that each rank has what an optimizer has to step by itself.

    Raises:
        ConfigError: a rank has only a part of it.
    """
    experts = [m.layout.name for m in members if m.group is not None and m.layout.expert_dim is not None]
    whole = "whole tensors" if kind.whole == "tensors" else "all tensors at once"
    for applies, problem in (
        (options.stage > 0, f"ZeRO's stage {options.stage} shards them: set stage 0"),
        (bool(options.offload.portions), "offload and sub_group_size step parts of them: leave these out"),
        (grid.tensor.size > 1, f"the grid's tensor axis of {grid.tensor.size} shards them: make a grid of tensor 1"),
        (bool(experts), f"{(experts or [''])[0]} holds the tensors of several experts: use dense layers"),
        (
            kind.whole == "model" and grid.pipe.size > 1,
            f"each of the {grid.pipe.size} pipeline stages has only its own: make a grid of pipe 1",
        ),
        (
            kind.draws and grid.size > 1,
            f"it draws random numbers, which differ between {grid.size} ranks: use one process",
        ),
    ):
        if applies:
            raise ConfigError(
                f"{kind.name} has to step {whole}, because {kind.reason}, and {problem}. Or use an optimizer that "
                f"works element by element: {', '.join((*ELEMENTWISE, 'Lion'))}"
            )


def is_known(kind: type[torch.optim.Optimizer]) -> bool:
    """Return True for an optimizer of torch that works element by element, and for triax's."""
    torchs = kind.__module__.startswith("torch.optim.") and kind.__name__ in ELEMENTWISE
    return torchs or kind.__module__.startswith(f"{_PACKAGE}.engine.optim.") or getattr(kind, "layerwise", False)


def kind_of(
    make: MakeOptimizer, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype, device: torch.device
) -> OptimizerKind:
    """Return the kind of an optimizer: known, or found by a trial.

    Args:
        make: makes the optimizer from parameter groups.
        groups: the options of the parameter groups.
        dtype, device: of the tensors to step.

    Raises:
        ConfigError: the optimizer cannot be stepped, or its state cannot be saved and loaded.
    """
    made = partial(_Trial, make, groups, dtype, device)
    plain = made(_PLAIN)
    kind = type(plain.optimizers[0])
    name = kind.__name__
    if is_known(kind):
        return OptimizerKind(name, None)

    def problem(words: str, *cuts: Cut) -> str | None:
        try:
            kept = made(cuts[0]).trained(*cuts[1:]).difference(plain)
            return kept if kept is None else words.format(kept)
        except _StateError as error:
            return str(error)
        except Exception as error:  # whatever the class raises
            return f"of other parts it raises {type(error).__name__}: {error}"

    try:
        plain.trained()
    except Exception as error:
        raise ConfigError(
            f"{name} raised {type(error).__name__} in a trial step of two small tensors, without a closure, as engines "
            f"step: {error}. Use another optimizer"
        ) from error
    # Matrices that belong to a tensor would be huge for a flat part.
    reason = plain.shaped_state() or problem(_DEPENDS, _SHARDS, _FLAT)
    if reason is None:
        return OptimizerKind(name, None)
    if (lost := problem("{} differ after a resume", _PLAIN, _PLAIN)) is not None:
        raise ConfigError(
            f"{name} cannot be saved and resumed: {lost}. A checkpoint has the tensors of a parameter's state, and "
            "numbers and text of its state, its group and the optimizer's state_dict(). Let it keep nothing else, or "
            "use another optimizer"
        )
    apart = problem(_DEPENDS, _TENSORS, _TENSORS)
    draws = made(_PLAIN, seed=1).trained().difference(plain) is not None
    return OptimizerKind(name, "tensors" if apart is None else "model", apart or reason, draws)


class _StateError(Exception):
    """State that checkpoints cannot hold; the message says which."""


class _TrialPart(NamedTuple):
    optimizer: int
    group: int
    start: int
    parameter: nn.Parameter


class _Trial:
    """Optimizers over parts of the tensors a and b of each parameter group.

    Args:
        make, groups, dtype, device: as ``kind_of`` takes them.
        cut: the parts of each optimizer.
        seed: of the random numbers that the update draws.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Sequence[Mapping[str, Any]],
        dtype: torch.dtype,
        device: torch.device,
        cut: Cut,
        seed: int = 0,
    ) -> None:
        self._recipe, self._seed = (make, groups, dtype, device), seed
        self.steps = 0
        # One group of each kind: rates and the like may differ.
        kinds = {str({k: v != 0 if isinstance(v, float) else v for k, v in g.items()}): i for i, g in enumerate(groups)}
        self.parts = [
            _TrialPart(number, group, start, nn.Parameter(self._first(group)[start:stop].view(shape)))
            for number, parts in enumerate(cut)
            for group in kinds.values()
            for start, stop, shape in parts
        ]
        self.optimizers = []
        for number in range(len(cut)):
            listed = [{**copy.deepcopy(dict(options)), "params": []} for options in groups]
            for part in self.parts:
                if part.optimizer == number:
                    listed[part.group]["params"].append(part.parameter)
            self.optimizers.append(in_training(make(listed)))

    def trained(self, *later: Cut) -> _Trial:
        """Take all steps, an equal number under each cut, and return the trial under the last cut."""
        torch.manual_seed(self._seed)
        trial = self
        for index, cut in enumerate((None, *later)):
            if cut is not None:
                trial = trial._moved(cut)
            while trial.steps < _STEPS * (index + 1) // (len(later) + 1):
                trial._step()
        return trial

    def difference(self, other: _Trial) -> str | None:
        """Return what differs from another result: the name of a number that is kept, or the weights. None: nothing."""
        for group in {part.group for part in self.parts}:
            for start in (0, _SIZE // 2):
                numbers, other_numbers = self._numbers(group, start), other._numbers(group, start)
                for key in (*numbers, *(other_numbers.keys() - numbers.keys())):
                    if key not in numbers or key not in other_numbers or not _alike(numbers[key], other_numbers[key]):
                        return f"its numbers {key!r}"
            weights, other_weights = self._weights(group), other._weights(group)
            epsilon = torch.finfo(weights.dtype).eps
            moved = (other_weights - self._first(group)).abs().max()
            if not (weights - other_weights).abs().max() <= 1e3 * epsilon * moved + 2 * epsilon:
                return "its new weights"
        return None

    def shaped_state(self) -> str | None:
        """Return which state has neither the shape of its tensor nor is one number, or None."""
        for part in self.parts:
            for key, value in self._state(part).items():
                if not (is_elementwise(value, part.parameter) or is_number(value, part.parameter)):
                    shapes = [*value.shape], [*part.parameter.shape]
                    return f"it keeps {key!r} of shape {shapes[0]} for a tensor of shape {shapes[1]}"
        return None

    def _step(self) -> None:
        """Step all optimizers, with gradients that depend on the element and on the step."""
        for part in self.parts:
            stop = part.start + part.parameter.numel()
            elements = torch.arange(part.start, stop, dtype=torch.float64)
            size = (0.1 + elements / _SIZE) * (1 + self.steps % 3)  # rows, blocks and tensors have different norms
            gradient = size * torch.sin(elements * (0.9 + self.steps) + part.group)
            part.parameter.grad = gradient.to(part.parameter).view(part.parameter.shape)
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1

    def _moved(self, cut: Cut) -> _Trial:
        """Return a trial under another cut with the weights and state of this one, as checkpoints move them.

        Raises:
            _StateError: there is state that checkpoints cannot hold.
        """
        make, groups, dtype, device = self._recipe
        trial = _Trial(make, groups, dtype, device, cut, self._seed)
        trial.steps = self.steps
        for optimizer in trial.optimizers:
            source = self.optimizers[0]
            for group, entries in zip(optimizer.param_groups, group_entries(source), strict=True):
                group.update(_saved(entries, "param_groups"))
            if own := own_entries(source):
                load_own_entries(optimizer, _saved(own, "state_dict()"))
        for part in trial.parts:
            state = trial.optimizers[part.optimizer].state
            loaded: dict[str, Any] = {}
            before = self._part(part.group, part.start)
            for key, value in self._state(before).items():
                if is_elementwise(value, before.parameter):
                    loaded[key] = self._row(part.group, key)[part.start :][: part.parameter.numel()]
                    loaded[key] = loaded[key].view(part.parameter.shape).clone()
                elif is_number(value, before.parameter):
                    loaded[key] = _saved(value, f"state[{key!r}]")
                else:  # of another shape, in a cut of the same parts
                    loaded[key] = value.clone()
            if loaded:
                state[part.parameter].update(loaded)
            weights = self._weights(part.group)[part.start :][: part.parameter.numel()]
            part.parameter.data.copy_(weights.view(part.parameter.shape))
        return trial

    def _first(self, group: int) -> Tensor:
        """Return the weights at the start, of all parts of a group."""
        _, _, dtype, device = self._recipe
        return (torch.cos(0.7 * torch.arange(_SIZE, dtype=torch.float64) + group) / 4).to(device, dtype)

    def _part(self, group: int, element: int) -> _TrialPart:
        """Return the part of a group that has an element."""
        return [part for part in self.parts if part.group == group and part.start <= element][-1]

    def _state(self, part: _TrialPart) -> dict[str, Any]:
        return dict(self.optimizers[part.optimizer].state.get(part.parameter, {}))

    def _weights(self, group: int) -> Tensor:
        return torch.cat([part.parameter.detach().view(-1) for part in self.parts if part.group == group])

    def _row(self, group: int, key: str) -> Tensor:
        """Return the elementwise state under a key, of all parts of a group."""
        return torch.cat([self._state(part)[key].view(-1) for part in self.parts if part.group == group])

    def _numbers(self, group: int, element: int) -> dict[str, Any]:
        """Return the numbers that are kept for an element: of its part's state, its group and its optimizer."""
        part = self._part(group, element)
        optimizer = self.optimizers[part.optimizer]
        state = {k: v for k, v in self._state(part).items() if is_number(v, part.parameter)}
        return {**group_entries(optimizer)[group], **own_entries(optimizer), **state}


def _saved(value: Any, where: str) -> Any:
    """Return a value after a way through a checkpoint."""
    try:
        return decode(encode(value, None, where))
    except TypeError as error:
        raise _StateError(str(error)) from error


def _alike(value: Any, other: Any) -> bool:
    """Return True if two numbers, or nests of them, are equal except for rounding."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        value, other = value.tolist(), other.tolist()
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_alike(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_alike, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-5)
    return bool(value == other)
