"""The resolved run: model configuration, topology, schedule, engine options and steps. No torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, nearest, no_such
from ..base.hub import local_folder, pinned
from ..base.named_function import named_function
from ..base.option_error import OptionError
from ..engine.setup.asked_schedule import schedule_of, with_passes
from ..grid.environment import replica_name
from ..grid.topology import Topology
from ..models.config import CONFIGS, DeepseekConfig, TransformerConfig, config_from_fields
from ..models.huggingface.config import as_reward, from_hf, is_reward, read_config, to_hf
from ..options.base import Options, as_kind, declared
from ..options.batch import Batch, BatchSizes
from ..options.checkpoints import Checkpoints
from ..options.dialect import GivenOptions, find_dialect
from ..options.engine import EngineOptions
from ..options.monitoring import Monitoring
from ..options.named import Optimizer
from ..options.schedule import ScheduleOptions
from ..pipe.cuts import StageCut, find_cut
from ..pipe.partition import boundaries
from ..pipe.program.layer_costs import LayerCosts
from ..pipe.program.schedule import Schedule
from ..pipe.program.slices import require_slices, slice_lengths
from ..pipe.schedules.choose import require_schedule
from .learning_rate import LearningRate
from .sections import ModelSection, TrainingFile

_MOST_OPS = 10**6  # passes of a step


@dataclass(frozen=True)
class Job:
    """A training run as it will be, the same on every rank.

    Attributes:
        file: the keys of the training file.
        model: the model's configuration.
        topology: the grid.
        schedule: the pipeline schedule of a step.
        options: the engine's options.
        batch: sequences of a step, of a microbatch, and microbatches of a step and replica.
        sequence: tokens of a sequence.
        steps: optimizer steps of the run.
        peak: the highest learning rate; None: ``deepspeed`` names a schedule of its own.
        learning_rate: the schedule; None as ``peak``.
        tokenizer: name for ``open_tokenizer``; None: the data's tokenizer is not checked.
        cut: the cut by the layers' costs; None: another one, or the layers are not measured yet.
    """

    file: TrainingFile
    model: TransformerConfig
    topology: Topology
    schedule: Schedule
    options: EngineOptions
    batch: BatchSizes
    sequence: int
    steps: int
    learning_rate: LearningRate | None
    tokenizer: str | None
    cut: StageCut | None = None

    @property
    def folder(self) -> Path:
        """Folder of the run; of one replica in it with ``fault_tolerance``."""
        return Path(self.own(str(Path(self.file.runs) / self.file.name)))

    def own(self, folder: str) -> str:
        """Return a folder of the run, or with ``fault_tolerance`` the folder of this replica in it."""
        faults = self.options.fault_tolerance
        return folder if faults is None else faults.own(folder, faults.replica)

    @property
    def checkpoints(self) -> str | None:
        """Folder of the checkpoints, or its URI; None: there are none."""
        folder = self.options.checkpoint.folder
        return None if folder is None else self.own(folder)

    @property
    def export(self) -> Path | None:
        """Folder of the Hugging Face model that is written at the end; None: none is."""
        section = self.file.export
        if section is None or self.file.model.layers is not None:
            return None
        return self.folder / "model" if section.folder is None else Path(self.own(section.folder))

    @property
    def rows(self) -> int:
        """Rows of a sample: 2 of a pair of answers, else 1. A batch counts samples."""
        return 2 if self.file.method is not None and self.file.method.form in ("pairs", "scored") else 1

    @property
    def parameter_count(self) -> int:
        """Number of weights: of a reward model those of the language model, with a score for its output layer."""
        model = self.model
        if self.file.method is None or self.file.method.name != "reward":
            return model.parameter_count
        head = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        return model.parameter_count - head + model.hidden_size

    @property
    def starts_with_score(self) -> bool:
        """True if the model's folder is that of a reward model."""
        return _has_score(self.file.model)

    @property
    def document_mask(self) -> bool:
        """True if rows come with document numbers: those of a text do, prompts with answers do not."""
        return self.file.data.document_mask and self.file.method is None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all replicas, padding included. With a method it is the most, for the longest rows."""
        return self.batch.train * self.rows * self.sequence

    @property
    def precision(self) -> str:
        """Dtype of the computation: fp32, bf16, fp16 or fp64."""
        return self.options.precision.weights or "fp32"

    @property
    def precision_is_default(self) -> bool:
        """True if the file names no dtype, so that the run computes in fp32."""
        return self.options.precision.weights is None

    @property
    def layers(self) -> int:
        """Number of entries in the list of layers: embedding, positions of a GPT, blocks, norm, head."""
        return layer_count(self.file.model, self.model)


def resolve(file: TrainingFile, processes: int | None = None, places: int | None = None) -> Job:
    """Return the run of a training file.

    Args:
        file: the checked file.
        processes: number of processes that the launcher started; None: the run starts its own.
        places: number of devices on this host, for ``grid.data: auto`` without a launcher; None: 1 replica.

    Raises:
        ConfigError: keys that contradict one another, or that this model or grid cannot have; the message names them
            and says what to change.
    """
    file = _pinned(file)
    model = model_config(file.model) if file.model.layers is None else own_config(file)
    layers = layer_count(file.model, model)
    topology = _topology(file, processes, places)
    given = _deepspeed(file)
    sequence = file.training.sequence or model.max_position_embeddings
    names = partial(name_of, overridden=frozenset(given.fields))
    try:
        options = _options(file, given, _batch(file, given, sequence))
        batch = options.batch_sizes(topology.size("data"))
    except OptionError as error:
        raise ConfigError(error.spelled(names)) from error
    schedule = _with_passes(_schedule(file, options.schedule, topology, batch, layers), options)
    _check_model(file, model, topology, schedule, sequence, layers)
    steps = _steps(file, batch, sequence, model.vocab_size)
    if file.method is not None and isinstance(model, DeepseekConfig) and model.num_nextn_predict_layers:
        raise ConfigError(
            f"method {file.method.name} does not train modules of multi-token prediction, and the model has "
            f"{model.num_nextn_predict_layers}: give model.overrides {{num_nextn_predict_layers: 0}}"
        )
    if file.method is not None:
        _check_method(file, model, topology, batch, sequence)
    if _has_score(file.model) and (file.method is None or file.method.name != "reward"):
        raise ConfigError(
            f"model.folder {file.model.folder} is a reward model, which has scores instead of logits: write method: "
            "reward, or give a language model"
        )
    if file.sample is not None and topology.expert > 1:
        raise ConfigError(
            f"sample needs all experts of a layer on one rank, but grid.expert is {topology.expert}: leave sample out, "
            "and run triax generate on the exported model"
        )
    job = Job(
        file=file,
        model=model,
        topology=topology,
        schedule=schedule,
        options=options,
        batch=batch,
        sequence=sequence,
        steps=steps,
        learning_rate=None if options.lr_scheduler is not None else _learning_rate(file, steps, batch.train * sequence),
        tokenizer=_tokenizer(file),
    )
    costs = file.schedule.layer_costs
    return job if costs is None else cut_by(LayerCosts.from_json(Path(costs)), job)


def _has_score(section: ModelSection) -> bool:
    return section.has_weights and is_reward(read_config(local_folder(str(section.folder))))


def _check_method(
    file: TrainingFile, model: TransformerConfig, topology: Topology, batch: BatchSizes, most: int
) -> None:
    """Check that the method goes with the rest of a file, whose rows have ``most`` tokens.

    Raises:
        ConfigError: it does not; the message names the keys.
    """
    method = file.method
    assert method is not None
    if method.name == "reward":
        if file.sample is not None:
            raise ConfigError("sample has no effect on a reward model, which writes no text: leave it out")
        if file.export is not None:
            try:
                as_reward(to_hf(model))
            except ValueError as error:
                raise ConfigError(f"export cannot write this reward model: {error} Or write export: false") from error
    if method.name == "distill" and not method.is_stored:
        _check_second(f"method.teacher {method.teacher}", str(method.teacher), model, topology, most)
        if method.top_k is not None and method.top_k >= model.vocab_size:
            raise ConfigError(
                f"method.top_k is {method.top_k}, but the model's vocabulary has {model.vocab_size} tokens: give "
                "less, or leave it out"
            )
    if method.name == "distill" and method.is_stored and file.data.validation is not None:
        raise ConfigError(
            f"method.teacher {method.teacher} has only the tokens of data.training: give data.held_out instead of "
            "data.validation"
        )
    if method.name != "grpo":
        return
    rows = batch.train * method.steps_per_rollout
    if rows % method.group:
        raise ConfigError(
            f"batch.size {batch.train} x method.steps_per_rollout {method.steps_per_rollout} is {rows} answers, no "
            f"multiple of method.group {method.group}: give {math.lcm(method.group, rows)} answers, or another group"
        )
    assert method.max_new_tokens is not None
    if method.max_new_tokens >= most:
        raise ConfigError(
            f"method.max_new_tokens is {method.max_new_tokens}, which leaves no room for a prompt in training.sequence "
            f"{most}: give less"
        )
    if topology.expert > 1:
        raise ConfigError(
            f"method grpo draws answers, for which all experts of a layer must lie on one rank, but grid.expert is "
            f"{topology.expert}: write expert: 1"
        )
    if file.grid.sequence_parallel:
        raise ConfigError(
            "grid.sequence_parallel shares a row's tokens evenly, but the answers of method grpo have any length: "
            "leave it out"
        )
    if file.training.spikes.action == "rewind":
        raise ConfigError(
            "training.spikes rewind leaves out the batches of a spike, but method grpo would draw the same ones: write "
            "skip"
        )
    if method.reference is not None:
        _check_second(f"method.reference {method.reference}", method.reference, model, topology, most)


def _check_second(what: str, folder: str, model: TransformerConfig, topology: Topology, most: int) -> None:
    """Check that a teacher or a reference has the vocabulary of a model, and runs on its grid."""
    try:
        section = ModelSection(folder=folder)
        second = model_config(section)
    except ConfigError as error:
        raise ConfigError(f"{what}: {str(error).partition(': ')[2] or error}") from error
    if _has_score(section):
        raise ConfigError(f"{what} is a reward model, which has scores instead of logits: give a language model")
    if second.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{what} has a vocabulary of {second.vocab_size}, and the model of {model.vocab_size}: give one with the "
            "same tokens"
        )
    if second.max_position_embeddings < most:
        raise ConfigError(
            f"{what} has {second.max_position_embeddings} positions, less than training.sequence {most}: give a "
            "smaller sequence"
        )
    if isinstance(second, DeepseekConfig) and second.num_nextn_predict_layers:
        raise ConfigError(f"{what} has modules of multi-token prediction, which no method takes: give another model")
    if topology.size("pipe") > second.layer_count:
        raise ConfigError(
            f"{what} has {second.layer_count} layers for grid.pipe {topology.size('pipe')}: give fewer stages"
        )
    try:
        second.check_tensor(topology.size("tensor"))
    except ValueError as error:
        raise ConfigError(f"grid.tensor: {what}: {error}") from error


def cut_by(costs: LayerCosts, job: Job) -> Job:
    """Return a run with the stages, and for ``schedule.partition`` auto the schedule, that the layers' costs give.

    Raises:
        ConfigError: the costs are of another number of layers, or the memory limit cannot be kept.
    """
    section, own = job.file.schedule, job.schedule
    if len(costs.layers) != job.layers:
        raise ConfigError(
            f"schedule.layer_costs {section.layer_costs} has {len(costs.layers)} layers, and the model {job.layers}: "
            "leave it out, so that the run measures them"
        )
    chunks = section.chunks if section.partition == "auto" else own.chunks
    try:
        limits = job.options.schedule.limits
        plain = schedule_of(job.options.schedule, own.pipe, own.microbatches, own.chunks)  # as the engine cuts for it
        cut = find_cut(section.partition, costs, own.pipe, own.microbatches, plain, chunks, limits)
    except ValueError as error:
        raise ConfigError(f"schedule: {error}") from error
    named = {"name": cut.schedule.name, "chunks": cut.schedule.chunks} if section.partition == "auto" else {}
    options = job.options.changed(schedule=job.options.schedule.changed(limit=None, **named))
    return replace(job, cut=cut, schedule=_with_passes(cut.schedule, options), options=options)


def _pinned(file: TrainingFile) -> TrainingFile:
    """Return the file with the commits of its model and tokenizer on the Hub, so that all ranks read the same ones."""
    names = {"model.folder": file.model.folder, "tokenizer": file.tokenizer}
    if file.method is not None:
        names |= {"method.reference": file.method.reference}
        names |= {} if file.method.is_stored else {"method.teacher": file.method.teacher}
    found = dict(names)
    for key, name in names.items():
        try:
            found[key] = None if name is None else pinned(name)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
    if found == names:
        return file
    if file.method is not None:
        second = {key.partition(".")[2]: found[key] for key in found if key.startswith("method.")}
        file = file.changed(method=file.method.changed(**second))
    return file.changed(model=file.model.changed(folder=found["model.folder"]), tokenizer=found["tokenizer"])


# ---------------------------------------------------------------------------------------------------- the model


def model_config(section: ModelSection) -> TransformerConfig:
    """Return the model's configuration: a preset or a folder's, with the overrides.

    Raises:
        ConfigError: there is no such preset, folder or field, or the fields contradict one another.
    """
    if section.layers is not None:
        raise ConfigError(
            f"model.layers {section.layers} is a function of yours, and this command knows triax's own models alone: "
            "give a preset or a folder"
        )
    if section.preset is not None:
        kinds = [cls for cls in CONFIGS.values() if section.preset in cls.PRESETS]
        if not kinds:
            names = dict.fromkeys(name for cls in CONFIGS.values() for name in cls.PRESETS)
            raise ConfigError(f"model.preset: there is no preset {section.preset!r}; {nearest(section.preset, names)}")
        where, found = f"model.preset {section.preset}", kinds[0].preset(section.preset)
    else:
        assert section.folder is not None  # the schema requires one of the two
        where = f"model.folder {section.folder}"
        try:
            folder = local_folder(section.folder)
            found = from_hf(read_config(folder), folder / "config.json")
        except (ValueError, OSError) as error:
            raise ConfigError(f"{where}: {error}") from error
    return _with_overrides(section, found, where)


def own_config(file: TrainingFile) -> TransformerConfig:
    """Return the configuration that the function ``model.layers`` gets.

    Raises:
        ConfigError: there is no such function, its argument has no default, or the file asks for what the function's
            layers cannot do.
    """
    section = file.model
    if section.preset is not None:
        found = model_config(section.changed(layers=None, overrides={}))
    else:
        argument = next(iter(inspect.signature(layers_function(section)).parameters.values()), None)
        if argument is None or not isinstance(argument.default, TransformerConfig):
            raise ConfigError(
                f"model.layers {section.layers}: its first argument has no configuration as its default, such as "
                "triax.GPTConfig(...): give it one, or give model.preset"
            )
        found = argument.default
    asked = {
        "export": "export" in file.given and file.export is not None,
        "sample": file.sample is not None,
        "evaluate.best": file.evaluate.best,
        "evaluate.tasks": bool(file.evaluate.tasks),
        "grid.sequence_parallel": file.grid.sequence_parallel,
        "grid.context": file.grid.context > 1,
        "method": file.method is not None and file.method.name != "sft",
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"{key} works with triax's own models, and model.layers is a function: leave {key} out")
    if file.method is None and "document_mask" not in file.data.given:
        raise ConfigError(
            "data.document_mask is true, for which the first layer of model.layers gets a pair of tokens and document "
            "numbers: write false, or true if your layers take the pair"
        )
    return _with_overrides(section, found, f"model.layers {section.layers}")


def layers_function(section: ModelSection) -> Callable[..., Any]:
    """Return the function that ``model.layers`` names.

    Raises:
        ConfigError: there is none.
    """
    assert section.layers is not None
    try:
        return named_function(section.layers)
    except ValueError as error:
        raise ConfigError(f"model.layers: {error}") from error


def layer_count(section: ModelSection, model: TransformerConfig) -> int:
    """Return the number of entries in the list of layers."""
    return model.layer_count if section.layers is None else len(layers_function(section)(model))


def _with_overrides(section: ModelSection, found: TransformerConfig, where: str) -> TransformerConfig:
    """Return a configuration with the fields that ``model.overrides`` changes."""
    changes = dict(section.overrides)
    for key in changes:
        if key not in found.settings():
            raise ConfigError(no_such("model.overrides", key, found.settings()))
    try:
        if any(isinstance(value, (Mapping, list)) for value in changes.values()):
            return config_from_fields(type(found).__name__, {**_plain(found), **changes})
        # A preset is made again, because other fields may follow from those that change.
        return replace(found, **changes) if section.preset is None else type(found).preset(section.preset, **changes)
    except OptionError as error:
        raise error.within("model.overrides") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.overrides of {where}: {error}") from error


def _plain(model: TransformerConfig) -> dict[str, Any]:
    """Return the fields that ``config_from_fields`` takes."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in asdict(model).items()}


def needs_sequences(file: TrainingFile) -> str | None:
    """Return the reason why a run cannot cut its sequences into slices, whatever its model; None if it can."""
    if file.method is not None and file.method.name != "sft":
        return f"method {file.method.name} has a loss of whole sequences"
    return None if file.compile is None else "compile would compile each layer again for each slice"


def _check_model(
    file: TrainingFile, model: TransformerConfig, topology: Topology, schedule: Schedule, sequence: int, count: int
) -> None:
    """Check that the model can be cut as the grid asks, and has positions for the sequence."""
    tensor, expert = topology.size("tensor"), topology.expert
    if sequence > model.max_position_embeddings:
        raise ConfigError(
            f"training.sequence is {sequence}, but the model has {model.max_position_embeddings} positions: give at "
            f"most {model.max_position_embeddings}, or a model with more max_position_embeddings"
        )
    try:
        model.check_tensor(tensor)
    except ValueError as error:
        raise ConfigError(f"grid.tensor: {error}") from error
    if file.grid.sequence_parallel and sequence % tensor:
        near = sequence // tensor * tensor or tensor
        raise ConfigError(
            f"training.sequence {sequence} is not shared evenly by grid.tensor {tensor}, as sequence_parallel needs: "
            f"give {near}"
        )
    try:
        reason = model.refuses_slices(file.model.experts.arguments)
        require_slices(schedule.slices, sequence, tensor, file.grid.context, reason)
    except ValueError as error:
        raise ConfigError(f"schedule.slices: {error}") from error
    if len(schedule.slices) > 1 and (reason := needs_sequences(file)) is not None:
        raise ConfigError(f"schedule.slices: {reason}: leave slices out, for whole sequences")
    experts = next((getattr(model, n) for n in ("num_experts", "n_routed_experts") if hasattr(model, n)), 0)
    if expert > 1 and not experts:
        raise ConfigError(
            f"grid.expert is {expert}, but a {type(model).__name__} has no experts: leave grid.expert out"
        )
    if experts % expert:
        raise ConfigError(f"grid.expert is {expert}, but it does not divide the model's {experts} experts: change one")
    if not experts and file.model.experts.given:
        raise ConfigError(f"model.experts has no effect on a {type(model).__name__}, which has none: leave it out")
    if "attention" in file.model.given and file.grid.context == 1:
        raise ConfigError(
            f"model.attention {file.model.attention} has no effect, because grid.context is 1: leave it out, or give "
            "grid.context"
        )
    cut = file.schedule.partition
    given = "uniform" if isinstance(cut, str) else cut  # the classes of the layers are not known here
    try:
        boundaries(given, len(schedule.placement), ["layer"] * count, lambda: [1.0] * count)
    except ValueError as error:
        raise ConfigError(f"grid.pipe x chunks is {len(schedule.placement)} stages, but {error}") from error


# -------------------------------------------------------------------------------------- grid, schedule, batches


def _topology(file: TrainingFile, processes: int | None, places: int | None) -> Topology:
    grid = file.grid
    sizes = {"pipe": grid.pipe, "context": grid.context, "tensor": grid.tensor}
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis != "context")
    replica = math.prod(sizes.values())
    if isinstance(grid.data, int):
        data = grid.data
    else:
        if processes is not None and processes % replica:
            raise ConfigError(
                f"grid: {shown} takes {replica} processes a replica, and there are {processes}, no multiple of that: "
                f"give axes whose product divides {processes}, or start a multiple of {replica}"
            )
        data = max(1, (processes or places or 1) // replica)
    axes = {"pipe": grid.pipe, "data": data, "context": grid.context, "tensor": grid.tensor}
    if grid.context == 1:
        del axes["context"]
    try:
        topology = Topology(expert=grid.expert, **axes)
    except ValueError as error:
        raise ConfigError(f"grid: {error}") from error
    if processes is not None and processes != topology.world_size:
        raise ConfigError(
            f"grid: data {data} x {shown} is a grid of {topology.world_size} processes, and there are {processes}: "
            "write data: auto, or change an axis or the number of processes"
        )
    return topology


def _batch(file: TrainingFile, given: GivenOptions, sequence: int) -> Batch:
    """Return the batch that the file asks for: the sequences of a step, in microbatches of 1 if nothing says more."""
    batch = file.batch
    if batch.tokens is not None:
        if batch.tokens % sequence:
            near = max(1, round(batch.tokens / sequence)) * sequence
            raise ConfigError(
                f"batch.tokens {batch.tokens} is no multiple of the sequence of {sequence} tokens: give {near}"
            )
        batch = batch.changed(tokens=None, size=batch.tokens // sequence)
    said = given.fields.get("batch", {})
    if (batch.size, batch.microbatches) == (None, None) and not {"size", "microbatches"} & said.keys():
        raise ConfigError("there is no batch: give batch, the sequences of a step, or batch.tokens")
    if batch.microbatch is None and batch.microbatches is None and "microbatches" not in said:
        batch = batch.changed(microbatch=1)
    return as_kind(batch, Batch)


def _schedule(
    file: TrainingFile, options: ScheduleOptions, topology: Topology, batch: BatchSizes, layers: int
) -> Schedule:
    require_schedule("schedule", options.name)
    if options.name == "forward":
        raise ConfigError("schedule is forward, which has no backward passes: give one for training, such as 1f1b")
    passes = options.pairs is not None or options.recompute > 0 or options.offload.device != "none"
    searched = [key for key in ("costs", "memory") if key in file.schedule.given]
    searched = [key for key in searched if key != "costs" or not passes]
    if searched and options.name != "auto":
        others = " and the options pairs, recompute and offload" if searched[0] == "costs" else ""
        raise ConfigError(
            f"schedule.{searched[0]} is for the schedule auto{others}, and this one is {options.name}: leave it out"
        )
    pipe, count, chunks = topology.size("pipe"), batch.accumulation, file.schedule.chunks
    if pipe * (chunks or 1) > layers:
        raise ConfigError(
            f"grid.pipe {pipe} x schedule.chunks {chunks or 1} is {pipe * (chunks or 1)} stages, but the model has "
            f"{layers} layers: give fewer stages"
        )
    if pipe * (chunks or 1) * count * len(slice_lengths(options.slices)) > _MOST_OPS:
        raise ConfigError(
            f"batch.size / microbatch / replicas is {count} microbatches a step in {pipe * (chunks or 1)} stages, "
            "too many for a schedule: give a smaller batch, or a larger microbatch"
        )
    try:
        return schedule_of(options, pipe, count, chunks)
    except ValueError as error:
        raise ConfigError(
            f"schedule: {error} (a step has {count} microbatches on each replica: batch.size / microbatch / replicas)"
        ) from error


def _with_passes(schedule: Schedule, options: EngineOptions) -> Schedule:
    """Return the schedule of a step as the engine makes it; the engine logs the notes."""
    try:
        return with_passes(schedule, options.schedule, options.recompute.asked)[0]
    except OptionError as error:
        raise ConfigError(error.spelled(options.names)) from error


def _steps(file: TrainingFile, batch: BatchSizes, sequence: int, vocab_size: int) -> int:
    training = file.training
    if training.steps is not None:
        return training.steps
    if training.tokens is not None:
        return math.ceil(training.tokens / (batch.train * sequence))
    if training.epochs is None:
        raise ConfigError("training has no end: give steps, tokens or epochs")
    from .data import open_answers, training_rows  # they open the data, which needs numpy and torch

    if file.method is not None:
        answers, _ = open_answers(file, sequence, _tokenizer(file), vocab_size)
        if file.method.form == "prompts":  # a batch counts answers
            return math.ceil(training.epochs * len(answers) * file.method.group / batch.train)
        return math.ceil(training.epochs * len(answers) / batch.train)
    rows = training_rows(file, sequence)
    if rows.is_mixture:
        raise ConfigError(
            "training.epochs has no meaning for a mixture, whose members end at different rows: give tokens or steps"
        )
    return math.ceil(training.epochs * rows.count / batch.train)


def _learning_rate(file: TrainingFile, steps: int, tokens: int) -> LearningRate:
    section = file.training.learning_rate
    warmup = section.warmup_steps
    if warmup is None:
        warmup = steps // 100 if section.warmup_tokens is None else math.ceil(section.warmup_tokens / tokens)
    decay = section.decay_steps or max(1, steps // 10)
    decay = decay if section.schedule == "wsd" else 0
    return LearningRate(section.schedule, warmup, steps, section.minimum, decay)


def _tokenizer(file: TrainingFile) -> str | None:
    if file.tokenizer is not None:
        return file.tokenizer
    folder = file.model.folder
    files = ("tokenizer.json", "tokenizer_config.json")
    return folder if folder is not None and any((local_folder(folder) / name).exists() for name in files) else None


# ------------------------------------------------------------------------------------------------- engine options


def name_of(path: str, overridden: frozenset[str] = frozenset()) -> str:
    """Return the key of an option in the training file.

    Args:
        path: the option.
        overridden: the options that the file's section ``deepspeed`` sets.
    """
    if path.partition(".")[0] in overridden:
        return f"deepspeed.{find_dialect('deepspeed').key_of(path)}"
    return path


def _deepspeed(file: TrainingFile) -> GivenOptions:
    """Return the options that the section ``deepspeed`` sets, without the keys that are "auto": the file has them."""
    if file.deepspeed is None:
        return GivenOptions({}, {})
    dialect = find_dialect("deepspeed")
    kept = dialect.given_keys(file.deepspeed)
    for ours in _given_options(file):
        key = dialect.key_of(ours).partition(".")[0]
        if key in kept and key != "checkpoint":
            raise ConfigError(f"{ours} and deepspeed.{key} say the same: give one of them")
    if (key := dialect.key_of("monitor.json").partition(".")[0]) in kept:
        raise ConfigError(
            f"deepspeed.{key} has no effect here, because metrics.jsonl is written in the run's folder: leave it out, "
            "and give name and runs"
        )
    for name in ("folder", "every", "keep", "resume"):
        key = dialect.key_of(f"checkpoint.{name}")
        section, _, last = key.partition(".")
        if isinstance(kept.get(section), Mapping) and last in kept[section]:
            raise ConfigError(f"deepspeed.{key} has no effect: leave it out, and give checkpoint.{name}")
    try:
        found = dialect.given_options(kept)
    except OptionError as error:
        raise ConfigError(error.spelled(lambda path: f"deepspeed.{dialect.key_of(path)}")) from error
    except ConfigError as error:
        text = str(error)
        begins = text.startswith(dialect.TITLE)
        raise ConfigError(text.replace(dialect.TITLE, "deepspeed", 1) if begins else f"deepspeed.{text}") from error
    for ours in _given_options(file):  # keys of these options may have several sections, as fp16 and bf16
        section, _, name = ours.partition(".")
        if name in (fields if isinstance(fields := found.fields.get(section), dict) else ()):
            raise ConfigError(f"{ours} and deepspeed.{dialect.key_of(ours)} say the same: give one of them")
    optimizer = found.fields.get("optimizer")
    if optimizer is not None and "lr" in optimizer.arguments and "peak" in file.training.learning_rate.given:
        raise ConfigError("training.learning_rate and deepspeed.optimizer.params.lr say the same: give one of them")
    if "lr_scheduler" in found.fields and "learning_rate" in file.training.given:
        raise ConfigError(
            f"training.learning_rate and deepspeed.{dialect.key_of('lr_scheduler')} say the same: give one of them"
        )
    return found


def _options(file: TrainingFile, given: GivenOptions, batch: Batch) -> EngineOptions:
    """Return the engine's options: those of the training file, and those that ``deepspeed`` sets in their place."""
    folder, peak, faults = str(Path(file.runs) / file.name), file.training.learning_rate.peak, file.fault_tolerance
    if "lr" in file.optimizer.arguments:
        raise ConfigError("optimizer.lr is the learning rate: give it as training.learning_rate")
    if faults is not None:
        faults = faults.changed(
            replica=faults.replica or replica_name(), folder=faults.folder or str(Path(folder) / "history")
        )
    named = given.fields.get("optimizer")
    if named is not None and "lr_scheduler" not in given.fields:
        given.fields["optimizer"] = Optimizer(named.type, **{"lr": peak, **named.arguments})
    rate = {} if "lr_scheduler" in given.fields else {"lr": peak}
    checkpoint = Checkpoints()
    if file.checkpoint.every is not None:
        place = file.checkpoint.folder or str(Path(folder) / "checkpoints")
        checkpoint = as_kind(file.checkpoint.changed(folder=place), Checkpoints)
    options = as_kind(file, EngineOptions).changed(
        batch=batch,
        optimizer=file.optimizer.at_rate(**rate),
        schedule=as_kind(file.schedule, ScheduleOptions),
        fault_tolerance=faults,
        monitor=as_kind(file.monitor.changed(json=folder, print_every=None), Monitoring),
        checkpoint=checkpoint,
        names=partial(name_of, overridden=frozenset(given.fields)),
    )
    return given.over(options)


def _given_options(file: TrainingFile) -> Iterator[str]:
    """Yield the paths of the engine's options that a file gives: of the sections, and of their options."""
    for each in declared(EngineOptions):
        if each.name in file.given:
            yield each.name
            section = getattr(file, each.name)
            yield from (f"{each.name}.{name}" for name in section.given) if isinstance(section, Options) else ()
    if file.batch.tokens is not None:
        yield "batch.size"  # it follows from them
