"""The resolved run: model configuration, topology, schedule, engine options and steps. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..base.errors import ConfigError
from ..base.hub import local_folder, pinned
from ..base.option_error import OptionError
from ..engine.setup.asked_schedule import schedule_of, with_passes
from ..grid.topology import Topology
from ..models.config import TransformerConfig
from ..options.base import as_kind
from ..options.batch import Batch, BatchSizes
from ..options.dialect import GivenOptions
from ..options.engine import EngineOptions
from ..options.local_updates import AsyncDiLoCo
from ..options.schedule import ScheduleOptions
from ..pipe.cuts import StageCut, find_cut
from ..pipe.program.layer_costs import LayerCosts
from ..pipe.program.schedule import Schedule
from ..pipe.program.slices import slice_lengths
from ..pipe.schedules.choose import require_schedule
from .engine_options import engine_options, foreign_options, name_of
from .learning_rate import LearningRate
from .method_checks import Facts, require_method_fits
from .model_choice import image_config, is_reward_model, layer_count, model_config, own_config, require_model_fits
from .sections import TrainingFile

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
        learning_rate: the schedule of the learning rate; None: the file names one of its own.
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
        return _rows_of_a_sample(self.file)

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
        return is_reward_model(self.file.model)

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
        return layer_count(self.file, self.model)


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
    configure = image_config if file.data.images else own_config if file.model.layers is not None else None
    model = model_config(file.model) if configure is None else configure(file)
    layers = layer_count(file, model)
    topology = _topology(file, processes, places)
    given = foreign_options(file)
    sequence = file.training.sequence or model.max_position_embeddings
    names = partial(name_of, overridden=frozenset(given.fields))
    try:
        options = engine_options(file, given, _batch(file, given, _rows_of_a_sample(file) * sequence))
        batch = options.batch_sizes(topology.size("data"))
    except OptionError as error:
        raise ConfigError(error.spelled(names)) from error
    schedule = _with_passes(_schedule(file, options.schedule, topology, batch, layers), options)
    require_model_fits(file, model, topology, schedule, sequence, layers)
    tokens = batch.train * _rows_of_a_sample(file) * sequence
    steps = _steps(file, batch, tokens, sequence, model.vocab_size)
    if file.method is not None:
        require_method_fits(Facts(file, file.method, model, topology, batch, sequence))
    if is_reward_model(file.model) and (file.method is None or file.method.name != "reward"):
        raise ConfigError(
            f"model.folder {file.model.folder} is a reward model, which has scores instead of logits: write method: "
            "reward, or give a language model"
        )
    _require_one_model(file, options)
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
        learning_rate=None if options.lr_scheduler is not None else _learning_rate(file, steps, tokens),
        tokenizer=tokenizer_of(file),
    )
    costs = file.schedule.layer_costs
    return job if costs is None else cut_by(LayerCosts.from_json(Path(costs)), job)


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


def _rows_of_a_sample(file: TrainingFile) -> int:
    return 2 if file.method is not None and file.method.form in ("pairs", "scored") else 1


def _batch(file: TrainingFile, given: GivenOptions, sample: int) -> Batch:
    """Return the batch that the file asks for: the samples of a step, in microbatches of 1 if nothing says more.

    Args:
        file: the training file.
        given: the options of another library's keys.
        sample: tokens of a sample.
    """
    batch = file.batch
    if batch.tokens is not None:
        if batch.tokens % sample:
            near = max(1, round(batch.tokens / sample)) * sample
            what = "the sequence" if _rows_of_a_sample(file) == 1 else "a pair of answers"
            raise ConfigError(f"batch.tokens {batch.tokens} is no multiple of {what} of {sample} tokens: give {near}")
        batch = batch.changed(tokens=None, size=batch.tokens // sample)
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


def _require_one_model(file: TrainingFile, options: EngineOptions) -> None:
    """Check that ``best`` and ``patience`` compare models that all replicas have."""
    local, section = options.local_updates, file.evaluate
    if local is None or options.fault_tolerance is not None or not (section.best or section.patience):
        return
    key = "best" if section.best else "patience"
    if isinstance(local, AsyncDiLoCo):
        raise ConfigError(
            f"evaluate.{key} compares one model of all replicas, which async_diloco has at the end only: leave it out, "
            "or give local_updates.type: diloco"
        )
    if section.patience and section.every < local.every:
        raise ConfigError(
            f"evaluate.patience counts evaluations of the weights after a synchronization, every {local.every} steps "
            f"(local_updates.every), but evaluate.every is {section.every}: give a multiple of {local.every}"
        )


def _steps(file: TrainingFile, batch: BatchSizes, tokens: int, sequence: int, vocab_size: int) -> int:
    """Return the steps of a run, each of them with so many ``tokens``."""
    training = file.training
    if training.steps is not None:
        return training.steps
    if training.tokens is not None:
        return math.ceil(training.tokens / tokens)
    if training.epochs is None:
        raise ConfigError("training has no end: give steps, tokens or epochs")
    from .data import open_answers, training_rows  # they open the data, which needs numpy and torch

    if file.method is not None:
        answers, _ = open_answers(file, sequence, tokenizer_of(file), vocab_size)
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


def tokenizer_of(file: TrainingFile) -> str | None:
    """Return the tokenizer that the file names, or else the model's folder if it has one; None: neither has one."""
    if file.tokenizer is not None:
        return file.tokenizer
    folder = file.model.folder
    files = ("tokenizer.json", "tokenizer_config.json")
    return folder if folder is not None and any((local_folder(folder) / name).exists() for name in files) else None
