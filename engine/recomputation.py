"""From the configuration's ``activation_checkpointing`` to what a module recomputes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..pipe.module import PipelineModule
from ..pipe.recompute import Recompute
from ..pipe.saved import Inputs
from ..pipe.schedules import Schedule
from .config import ActivationCheckpointingConfig, ConfigError


def set_up(module: PipelineModule, section: ActivationCheckpointingConfig, schedule: Schedule) -> list[str]:
    """Let a module recompute what the configuration says.

    Args:
        module: on the ranks that the schedule wants it on.
        section: of the configuration.
        schedule: says how many microbatches are held at a time.

    Returns:
        What the user asked for that changes nothing here, and why.

    Raises:
        ConfigError: it contradicts what the model was made with, or there is nothing of what it names.
    """
    interval = _interval(module, section)
    names = section.checkpointable_layers or module.checkpointable_layers
    _check_names(module, names)
    groups = bool(interval or section.number_checkpoints)
    notes = _notes(module, section, groups)
    granularity = section.granularity or "full"
    recompute = Recompute(
        module.grid,
        module.dropout_state,
        interval,
        section.number_checkpoints,
        names,
        granularity,
        preserve_rng_state=section.preserve_rng_state,
        synchronise=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )
    slots = most_held(module, recompute, schedule) if section.contiguous_memory_optimization else 0
    partition = section.partition_activations and granularity != "selective"
    recompute.inputs = Inputs(module.grid, partition, section.cpu_checkpointing, slots)
    module.recompute = recompute
    asking = recompute.install(module)
    if granularity == "selective" and not any(module.grid.world.all_gather_object(asking)):
        raise ConfigError(
            "activation_checkpointing: granularity selective, but no module of the model has a class attribute "
            "recompute (as triax.models' Attention has): set granularity to full or matmul"
        )
    return [f"activation_checkpointing: {note}" for note in notes]


def most_held(module: PipelineModule, recompute: Recompute, schedule: Schedule) -> int:
    """How many groups' inputs this rank holds at the same time, at the most."""
    counts = {stage: sum(g.again for g in recompute.groups(module, stage)) for stage in module.stages}
    held = most = 0
    for op in schedule.orders[module.grid.pipe.rank]:
        held += counts[op.stage] * {"F": 1, "B": -1, "I": -1, "W": 0}[op.kind]
        most = max(most, held)
    return most


def log_profile(module: PipelineModule) -> None:
    """After a step: what recomputation took, if that is measured."""
    report = module.recompute.report()
    if report is not None:
        count, seconds = report
        logging.getLogger("triax").warning(
            "%s: %d recomputations took %.1f ms of this step", module.grid.describe(), count, seconds * 1e3
        )


def _interval(module: PipelineModule, section: ActivationCheckpointingConfig) -> int:
    """Of the configuration, or of the model; 1 where only a granularity says that layers are recomputed."""
    given, own = section.interval, module.activation_checkpoint_interval
    if own and section.granularity == "selective":
        raise ConfigError(
            f"activation_checkpointing: granularity selective, but the model has activation_checkpoint_interval={own}, "
            "which recomputes whole layers: leave out one of them"
        )
    if own and section.number_checkpoints:
        raise ConfigError(
            f"activation_checkpointing: number_checkpoints {section.number_checkpoints}, but the model has "
            f"activation_checkpoint_interval={own}: both say how layers are grouped, leave out one of them"
        )
    if own and given is not None and given != own:
        raise ConfigError(
            f"activation_checkpointing: interval {given}, but the model has activation_checkpoint_interval={own}: "
            "leave out one of them"
        )
    if given is None and not own:
        return int(section.granularity in ("full", "matmul") and not section.number_checkpoints)
    return own if given is None else given


def _check_names(module: PipelineModule, names: Sequence[str] | None) -> None:
    there = {name for stage in range(len(module.placement)) for name in module.typenames(stage)}
    unknown = sorted(set(names or ()) - there)
    if unknown:
        raise ConfigError(
            f"activation_checkpointing: no layer of the model is a {unknown[0]}; there are {', '.join(sorted(there))}"
        )


def _notes(module: PipelineModule, section: ActivationCheckpointingConfig, groups: bool) -> list[str]:
    selective = section.granularity == "selective"
    given = [
        key
        for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "profile")
        if getattr(section, key)
    ]
    if given and not groups and not selective:
        return [f"{', '.join(given)}: nothing is recomputed; set interval to 1, say"]
    notes = []
    if section.partition_activations and selective:
        notes.append("partition_activations: q, k and v are each tensor rank's own already, and are kept so")
    elif section.partition_activations and module.grid.tensor.size == 1:
        notes.append("partition_activations: the tensor axis has one rank, which keeps all of each input")
    if section.cpu_checkpointing and module.grid.device.type == "cpu":
        notes.append("cpu_checkpointing: the model is in the host's memory, and so are its inputs")
    if section.number_checkpoints and not selective:
        stages = module.stages
        layers = sum(module.boundaries[s + 1] - module.boundaries[s] for s in stages)
        if not len(stages) <= section.number_checkpoints <= layers:
            notes.append(
                f"number_checkpoints {section.number_checkpoints}: a rank with {len(stages)} stages of {layers} layers "
                f"has at least {len(stages)} groups and at most {layers}"
            )
    return notes
