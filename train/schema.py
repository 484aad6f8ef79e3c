"""Every key of a training file: its type, default, limits and meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ..config.activation_checkpointing import ActivationCheckpointingConfig
from ..config.base import Section, setting
from ..config.compilation import CompileConfig
from ..config.lora import LoraConfig
from ..config.monitoring import WandbConfig
from ..config.zero import ZeroConfig
from ..grid.checks import SEEDS, check_folder_name
from ..grid.errors import describe

_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def count(value: Any) -> int | None:
    """Return a number of tokens: 500000, 1e9, "1.5B" (K, M, B and T are powers of 1000); None for None.

    Raises:
        ValueError: another value, or less than one token.
    """
    if value is None:
        return None
    found = _COUNT.fullmatch(str(value).replace("_", "").strip()) if not isinstance(value, bool) else None
    number = 0.0 if found is None else float(found[1]) * _POWERS[found[2].upper()]
    if number < 1 or number != int(number):
        raise ValueError("give a whole number of tokens of at least 1, such as 500000, 1e9 or 1.5B")
    return int(number)


def seconds(value: Any) -> float | None:
    """Return a time in seconds: "90m", "1h30m", "45s", "2d"; None for None.

    Raises:
        ValueError: a time without a unit, or no time at all.
    """
    if value is None:
        return None
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    total = 0.0 if found is None else sum(float(n or 0) * s for n, s in zip(found.groups(), (86400, 3600, 60, 1)))
    if total <= 0:
        raise ValueError("give a time with its unit, such as 90m, 1h30m, 45s or 2d")
    return total


# Sections for which a plain value may stand: the key that it is the value of.
SHORT = {
    "data": "training",
    "schedule": "name",
    "training.optimizer": "type",
    "training.learning_rate": "peak",
    "training.zero": "stage",
    "training.spikes": "action",
}


def _short(section: str) -> Any:
    """Return a validator that lets a plain value stand for a section, as ``SHORT`` says."""
    key = SHORT[section]

    def widen(value: Any) -> Any:
        return value if value is None or isinstance(value, (Mapping, Section)) else {key: value}

    return BeforeValidator(widen)


def _optional(value: Any) -> Any:
    """Return a section's values: ``false`` switches it off, ``true`` takes its defaults."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


Optional = BeforeValidator(_optional)


def _one_of(wanted: str, *kinds: type) -> Any:
    """Return a validator of a key that takes values of several kinds: one message, and not one for each kind."""

    def check(value: Any) -> Any:
        parts: Any = value or ()
        if not isinstance(value, (*kinds, type(None))) or not all(isinstance(each, str) for each in parts):
            raise ValueError(f"give {wanted}")
        return value

    return BeforeValidator(check)


def _run_name(value: Any) -> Any:
    """Return the name of a run if it can be the name of its folder."""
    if not isinstance(value, str):
        raise ValueError("give a text in quotes")
    if set("/\\") & set(value):
        raise ValueError("it is the name of the run's folder: give one without / and \\")
    return check_folder_name(value)


def _replicas(value: Any) -> Any:
    """Return a number of replicas, or ``auto``."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("give a whole number of at least 1, or auto")
    return value


def _weights(value: Any) -> Any:
    """Return a mixture's folders and weights if the weights are numbers above 0."""
    for folder, weight in value.items() if isinstance(value, Mapping) else ():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {folder} is {describe(weight)}: give a number above 0")
    return value


Folders = Annotated[
    str | list[str] | dict[str, float],
    BeforeValidator(_weights),
    _one_of("a folder, a list of folders, or {folder: weight}", str, list, Mapping),
]


class Keys(Section):
    """Base class of the sections of a training file."""


class ExpertsSection(Keys):
    """``model.experts``: options of the training of a mixture of experts."""

    balance: list[str] | None = setting(None, "Load balancing, as of triax.moe.MoE; null: the model's own.")
    bias_rate: float | None = setting(None, "Step of the balancing bias; null: the model's own.", gt=0.0)
    z_loss: float | None = setting(None, "Coefficient of the router's z-loss; null: the model's own.", ge=0.0)
    capacity: float | None = setting(
        None, "Most tokens of an expert, as a multiple of the mean; null: no token is dropped.", gt=0.0
    )
    shard_tensor: bool | None = setting(None, "Shard each expert over tensor ranks too; null: the model's own.")


class ModelSection(Keys):
    """``model``: a preset, or a Hugging Face folder."""

    preset: str | None = setting(None, "Name of a configuration, such as llama3-8b, gpt2 or bytes-small.")
    folder: str | None = setting(None, "Hugging Face folder: config.json and, unless weights is false, *.safetensors.")
    weights: bool = setting(True, "false: take the folder's shape alone, with random weights from the seed.")
    overrides: dict[str, Any] = setting({}, "Fields of the configuration to change; not with weights.")
    attention: Literal["ring", "ulysses", "gather"] = setting("ring", "Attention over the context axis.")
    experts: ExpertsSection = setting(ExpertsSection(), "Options of a mixture of experts.")
    lora: LoraConfig | None = setting(None, "Train low-rank adapters alone: docs/lora.md; null: all weights.")

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.preset is None) == (self.folder is None):
            given = "none of preset and folder is" if self.preset is None else "both preset and folder are"
            raise ValueError(f"{given} given, but the model comes from one: give one of them")
        if self.preset is not None and "weights" in self.model_fields_set and self.weights:
            raise ValueError("weights is true, but a preset has none: leave weights out, or give folder")
        if self.overrides and self.has_weights:
            raise ValueError(
                "overrides change the shape that the folder's weights have: leave them out, or set weights to false"
            )
        return self

    @property
    def has_weights(self) -> bool:
        """True if the weights come from a folder."""
        return self.folder is not None and self.weights


class DataSection(Keys):
    """``data``: folders that ``triax data tokenize`` wrote."""

    training: Folders = Field(description="Folder of tokens, a list of them, or a mixture {folder: weight}.")
    held_out: float | None = setting(None, "Share of the documents that is held out for evaluation.", gt=0.0, lt=1.0)
    validation: Folders | None = setting(None, "Folder or folders of tokens for evaluation, instead of held_out.")
    packing: Literal["cut", "whole"] | None = setting(
        None, "cut: a document goes on in the next row; whole: padded rows; null: whole for chat, else cut."
    )
    document_mask: bool = setting(True, "Tokens attend within their document only.")
    shuffle: bool = setting(True, "Draw an order of documents and rows for each epoch; false: the folder's own order.")
    threads: int = setting(1, "Threads that make batches ahead; 0: none.", ge=0)

    @model_validator(mode="after")
    def _one_part(self) -> DataSection:
        if self.held_out is not None and self.validation is not None:
            raise ValueError("held_out and validation both say what to evaluate on: give one of them")
        return self


class GridSection(Keys):
    """``grid``: sizes of the axes."""

    pipe: int = setting(1, "Stages of layers.", ge=1)
    data: Annotated[int | Literal["auto"], BeforeValidator(_replicas)] = setting(
        "auto", "Replicas; auto: what the other axes leave of the processes."
    )
    context: int = setting(1, "Parts of each sequence.", ge=1)
    tensor: int = setting(1, "Shards of each layer.", ge=1)
    expert: int = setting(1, "Shards of the experts, within the data axis.", ge=1)
    sequence_parallel: bool = setting(False, "Norms and dropout on the tensor ranks' shares of a sequence.")


class ScheduleSection(Keys):
    """``schedule``: a name, or a section with the name and its options."""

    name: str = setting("1f1b", "Name of a pipeline schedule, auto (search for one), or path of a .csv or .json file.")
    chunks: int | None = setting(None, "Stages per rank; null: the schedule's own number.", ge=1)
    costs: list[float] | None = setting(None, "For auto: measured times of F, I, W and a message, in any unit.")
    memory: float | None = setting(
        None, "For auto: limit of activations per rank, in microbatches through 1/pipe of the model.", gt=0
    )


class OptimizerSection(Keys):
    """``training.optimizer``: a name, or a section with type and arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = setting("AdamW", "Name, as in DeepSpeed or torch.optim; its other arguments stand beside it.")
    decays: Literal["matrices", "all"] = setting(
        "matrices", "Weights that decay. matrices: not norms, biases and embeddings; all: every parameter."
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the optimizer; AdamW's betas and weight_decay are those of GPT-3 if they are not given."""
        usual = {"betas": [0.9, 0.95], "weight_decay": 0.1} if self.type == "AdamW" else {}
        return usual | (self.model_extra or {})


class LearningRateSection(Keys):
    """``training.learning_rate``: a number, which is the peak, or a section."""

    peak: float = setting(3e-4, "Highest learning rate.", gt=0.0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine", "Rates after the warmup. wsd: warmup, stable, decay: constant, then linear over the last decay_steps."
    )
    warmup_steps: int | None = setting(None, "Steps of a linear warmup; null: 1 % of the steps.", ge=0)
    warmup_tokens: Annotated[int | None, BeforeValidator(count)] = setting(
        None, "Tokens of the warmup, instead of warmup_steps."
    )
    minimum: float = setting(0.1, "Last rate, as a share of the peak.", ge=0.0, le=1.0)
    decay_steps: int | None = setting(None, "For wsd: steps of the decay at the end; null: 10 % of the steps.", ge=1)

    @model_validator(mode="after")
    def _agrees(self) -> LearningRateSection:
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            raise ValueError("warmup_steps and warmup_tokens both say how long the warmup is: give one of them")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(f"decay_steps belongs to schedule wsd, and the schedule is {self.schedule}: leave it out")
        if self.schedule == "constant" and "minimum" in self.model_fields_set:
            raise ValueError("minimum has no effect on schedule constant, whose rate stays: leave it out")
        return self


class SpikesSection(Keys):
    """``training.spikes``: what happens when the loss or the gradient norm jumps."""

    action: Literal["none", "warn", "skip", "rewind"] = setting(
        "warn",
        "warn: print it; skip: take no step with this batch; rewind: go on from the last checkpoint, without these "
        "batches.",
    )
    loss: float = setting(6.0, "A loss is a spike above the median by so many standard deviations.", gt=0.0)
    norm: float = setting(10.0, "A gradient norm is a spike at so many times the median.", gt=1.0)
    window: int = setting(100, "Steps of which median and deviation are taken.", ge=2)
    limit: int = setting(3, "Times that a run rewinds before it gives up.", ge=1)


class TrainingSection(Keys):
    """``training``: how long, in which batches, and with which optimizer."""

    steps: int | None = setting(None, "Optimizer steps.", ge=1)
    tokens: Annotated[int | None, BeforeValidator(count)] = setting(
        None, "Tokens to train on, instead of steps: 1e9 or 1B."
    )
    epochs: float | None = setting(None, "Times through the documents, instead of steps.", gt=0.0)
    batch: int | None = setting(None, "Sequences a step, over all replicas.", ge=1)
    batch_tokens: Annotated[int | None, BeforeValidator(count)] = setting(
        None, "Tokens a step, instead of batch; a multiple of sequence."
    )
    microbatch: int | None = setting(
        None, "Sequences that pass through the pipeline at once; more use more memory. null: 1.", ge=1
    )
    sequence: int | None = setting(None, "Tokens of a sequence; null: the model's longest.", ge=1)
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = setting(
        "fp32", "Dtype of weights and arithmetic; bf16 and fp16 have fp32 master weights."
    )
    optimizer: Annotated[OptimizerSection, _short("training.optimizer")] = setting(
        OptimizerSection(), "The optimizer: a name, or type and arguments."
    )
    learning_rate: Annotated[LearningRateSection, _short("training.learning_rate")] = setting(
        LearningRateSection(), "The learning rate: its peak, or a section."
    )
    clip: float = setting(1.0, "Limit of the global gradient norm; 0: no limit.", ge=0.0)
    recompute: Annotated[ActivationCheckpointingConfig, BeforeValidator(lambda value: _recompute(value))] = setting(
        ActivationCheckpointingConfig(),
        "none, selective (the core of attention), full (every layer), or the section activation_checkpointing.",
    )
    compile: CompileConfig = setting(
        CompileConfig(), "true: torch.compile of each layer; or the section compile: docs/guides/compile.md."
    )
    zero: Annotated[ZeroConfig, _short("training.zero")] = setting(
        ZeroConfig(stage=1), "Stage of ZeRO, or the section zero_optimization."
    )
    time_limit: Annotated[float | None, BeforeValidator(seconds)] = setting(
        None, "Time after which the run ends in good order: 90m, 2h30m; null: none."
    )
    spikes: Annotated[SpikesSection, _short("training.spikes")] = setting(
        SpikesSection(), "Jumps of the loss or the gradient norm: an action, or a section."
    )

    @model_validator(mode="after")
    def _agrees(self) -> TrainingSection:
        for names in (("steps", "tokens", "epochs"), ("batch", "batch_tokens")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                what = "how long the run is" if "steps" in names else "how large a step is"
                raise ValueError(f"{' and '.join(given)} all say {what}: give one of them")
        return self


def _recompute(value: Any) -> Any:
    """Return the section ``activation_checkpointing`` of a plain word."""
    known: dict[Any, dict[str, Any]] = {
        "none": {},
        "selective": {"granularity": "selective"},
        "full": {"granularity": "full"},
    }
    if isinstance(value, (Mapping, ActivationCheckpointingConfig)):
        return value
    if not isinstance(value, str) or value not in known:
        raise ValueError("give none, selective, full, or a section as activation_checkpointing has it")
    return known[value]


class EvaluateSection(Keys):
    """``evaluate``: the loss on held-out documents."""

    every: int = setting(100, "Evaluate every so many steps, and at the end.", ge=1)
    sequences: int | None = setting(256, "Sequences to evaluate on, the first ones; null: all.", ge=1)


class CheckpointSection(Keys):
    """``checkpoint``: what a run goes on from."""

    folder: str | None = setting(
        None, "Folder of the checkpoints, or its URI as s3://bucket/run; null: checkpoints in the run's folder."
    )
    every: int = setting(500, "Save every so many steps; also at the end and when the run is stopped.", ge=1)
    keep: int | None = setting(2, "Number of checkpoints to keep; null: all.", ge=1)
    resume: str = setting(
        "auto",
        "auto: go on from the newest one, if there is one; required: there must be one; never: start from the "
        "beginning; or the tag of one, or the path of a checkpoint.",
    )
    async_: bool = setting(True, "Write in the background.", alias="async")
    requeue: bool = setting(
        True, "After SIGUSR1, which Slurm sends before the time limit: save, leave, and requeue the job."
    )


class SampleSection(Keys):
    """``sample``: a text that the model writes after each evaluation."""

    prompt: str = Field(description="Beginning of the text.", min_length=1)
    tokens: int = setting(100, "Tokens to add, if there is room.", ge=1)
    temperature: float = setting(0.7, "Lower is safer; 0 takes the likeliest token.", ge=0.0)


class MonitorSection(Keys):
    """``monitor``: what is printed and recorded; metrics.jsonl, report.html and pictures are always written."""

    log_every: int = setting(20, "A line every so many steps, where there is no terminal.", ge=1)
    print_losses: bool = setting(False, "Print every loss in full.")
    tensorboard: bool = setting(False, "Event files for TensorBoard, in the run's folder.")
    csv: bool = setting(False, "A CSV file for each metric, in the run's folder.")
    wandb: Annotated[WandbConfig | None, Optional] = setting(None, "Weights & Biases: true, or a section.")
    trace: int = setting(20, "Step of which timeline.json is; 0: none.", ge=0)
    histograms: int = setting(0, "Histograms of weights and gradients every so many steps; 0: never.", ge=0)


class ExportSection(Keys):
    """``export``: the model as a Hugging Face folder."""

    folder: str | None = setting(None, "Folder; null: model in the run's folder.")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = setting(
        None, "Dtype of the written weights; null: that of the training."
    )


class TrainingFile(Keys):
    """A training run: all keys of the file of ``triax train``."""

    TITLE: ClassVar[str] = "the training file"

    name: Annotated[str, BeforeValidator(_run_name)] = setting("run", "Name of the run: its folder in runs.")
    runs: str = setting("runs", "Folder of all runs.", min_length=1)
    seed: int = setting(0, "Seed of weights, dropout, the order of data and the sample.", ge=0, lt=SEEDS)
    model: ModelSection = Field(description="The model.")
    tokenizer: str | None = setting(
        None, "Tokenizer: its folder, its tokenizer.json, or bytes; null: the model folder's, or the data's."
    )
    data: Annotated[DataSection, _short("data")] = Field(description="The data: a folder of tokens, or a section.")
    grid: GridSection = setting(GridSection(), "Sizes of the axes.")
    schedule: Annotated[ScheduleSection, _short("schedule")] = setting(
        ScheduleSection(), "The pipeline schedule: a name, or a section."
    )
    training: TrainingSection = setting(TrainingSection(), "How long, in which batches, with which optimizer.")
    evaluate: EvaluateSection = setting(EvaluateSection(), "The loss on held-out documents.")
    checkpoint: Annotated[CheckpointSection | None, Optional] = setting(
        CheckpointSection(), "Checkpoints; false: none."
    )
    sample: Annotated[SampleSection | None, Optional] = setting(None, "A text after each evaluation; null: none.")
    monitor: MonitorSection = setting(MonitorSection(), "What is printed and recorded.")
    export: Annotated[ExportSection | None, Optional] = setting(
        ExportSection(), "The model as a Hugging Face folder at the end; false: none."
    )
    deepspeed: Annotated[
        dict[str, Any] | str | None, _one_of("a section, or the path of a JSON file", str, Mapping)
    ] = setting(
        None, "A DeepSpeed configuration, a section or a path, whose keys are taken as they are: docs/config.md."
    )

    @model_validator(mode="after")
    def _can_rewind(self) -> TrainingFile:
        if self.checkpoint is None and self.training.spikes.action == "rewind":
            raise ValueError(
                "training.spikes is rewind, but checkpoint is false, so that there is nothing to go back to: leave "
                "checkpoint out, or write skip"
            )
        return self


# Sections that docs/config.md and other pages describe key by key.
WHOLE = (ZeroConfig, ActivationCheckpointingConfig, LoraConfig, WandbConfig)
