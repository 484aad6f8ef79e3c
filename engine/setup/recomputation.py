"""Activation checkpointing of a ``PipelineModule``, from the section ``activation_checkpointing``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...config.activation_checkpointing import ActivationCheckpointingConfig
from ...grid.errors import ConfigError
from ...pipe.module import PipelineModule
from ...pipe.program.schedule import Schedule
from ...pipe.recompute.kept_inputs import Inputs
from ...pipe.recompute.recompute import Recompute


def configure_recomputation(
    module: PipelineModule, section: ActivationCheckpointingConfig, schedule: Schedule
) -> list[str]:
    """Install the recomputation that the configuration asks for.

    Args:
        module: with its stages on the ranks of the schedule.
        section: the configuration's ``activation_checkpointing``.
        schedule: gives the number of microbatches whose inputs are held at a time.

    Returns:
        Notes on keys that have no effect here, with the reason.

    Raises:
        ConfigError: a key contradicts an argument of the model, or names a layer class that the model does not have.
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
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )
    slots = max_inputs_held(module, recompute, schedule) if section.contiguous_memory_optimization else 0
    partition = section.partition_activations and granularity != "selective"
    recompute.inputs = Inputs(module.grid, partition, section.cpu_checkpointing, slots)
    module.recompute = recompute
    asking = recompute.install(module)
    if granularity == "selective" and not any(module.grid.world.all_gather_json(asking)):
        raise ConfigError(
            "activation_checkpointing has granularity selective, but no module of the model has a class attribute "
            "recompute, as Attention of triax.models has: set granularity to full or matmul"
        )
    return [f"activation_checkpointing: {note}" for note in notes]


def max_inputs_held(module: PipelineModule, recompute: Recompute, schedule: Schedule) -> int:
    """Return the largest number of recomputed groups of layers whose inputs this rank holds at the same time."""
    counts = {stage: sum(g.recomputed for g in recompute.groups(module, stage)) for stage in module.stages}
    held = most = 0
    for op in schedule.orders[module.grid.pipe.rank]:
        held += counts[op.stage] * {"F": 1, "B": -1, "I": -1, "W": 0}[op.kind]
        most = max(most, held)
    return most


def log_profile(module: PipelineModule) -> None:
    """Log the number and time of this step's recomputations, if ``profile`` is set."""
    report = module.recompute.report()
    if report is not None:
        count, seconds = report
        logging.getLogger("triax").warning(
            "%s: %d recomputations took %.1f ms of this step", module.grid.describe(), count, seconds * 1e3
        )


def _interval(module: PipelineModule, section: ActivationCheckpointingConfig) -> int:
    """Return the number of layers of a recomputed group, from the configuration or the model. 0: not set.

    If only a granularity is given, a group is one layer.
    """
    given, own = section.interval, module.activation_checkpoint_interval
    contradictions = {
        "granularity selective": section.granularity == "selective",
        f"number_checkpoints {section.number_checkpoints}": bool(section.number_checkpoints),
        f"interval {given}": given not in (None, own),
    }
    for key, contradicts in contradictions.items():
        if own and contradicts:
            raise ConfigError(
                f"activation_checkpointing has {key}, but the model has activation_checkpoint_interval={own}, which "
                "recomputes groups of that many whole layers: leave out one of them"
            )
    if given is None and not own:
        return int(section.granularity in ("full", "matmul") and not section.number_checkpoints)
    return own if given is None else given


def _check_names(module: PipelineModule, names: Sequence[str] | None) -> None:
    there = {name for stage in range(len(module.placement)) for name in module.typenames(stage)}
    unknown = sorted(set(names or ()) - there)
    if unknown:
        raise ConfigError(
            f"activation_checkpointing: no layer of the model is a {unknown[0]}; there are {', '.join(sorted(there))}. "
            "Give names of these classes in checkpointable_layers"
        )


def _notes(module: PipelineModule, section: ActivationCheckpointingConfig, groups: bool) -> list[str]:
    selective = section.granularity == "selective"
    given = [
        key
        for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "profile")
        if getattr(section, key)
    ]
    if given and not groups and not selective:
        return [f"{', '.join(given)}: nothing is recomputed; set interval to 1, for example"]
    notes = []
    if section.partition_activations and selective:
        notes.append("partition_activations: q, k and v are sharded over the tensor ranks already")
    elif section.partition_activations and module.grid.tensor.size == 1:
        notes.append("partition_activations: the tensor axis has one rank, which keeps all of each input")
    if section.cpu_checkpointing and module.grid.device.type == "cpu":
        notes.append("cpu_checkpointing: the model is in the host's memory already, and so are its inputs")
    if section.number_checkpoints and not selective:
        stages = module.stages
        layers = sum(module.boundaries[s + 1] - module.boundaries[s] for s in stages)
        if not len(stages) <= section.number_checkpoints <= layers:
            notes.append(
                f"number_checkpoints {section.number_checkpoints}: a rank with {len(stages)} stages of {layers} layers "
                f"has at least {len(stages)} groups and at most {layers}"
            )
    return notes
