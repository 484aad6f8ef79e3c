"""Every key of a training file: its type, default, limits and meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..base.checks import SEEDS, THREADS, check_folder_name, path_text
from ..base.errors import describe, nearest
from ..base.option_error import refusal
from ..options.base import REQUIRED, Options, declared, option
from ..options.compilation import Compile
from ..options.engine import EngineOptions
from ..options.fault_tolerance import FaultTolerance
from ..options.local_updates import LocalSGD
from ..options.lora import Lora
from ..options.monitoring import CommunicationLog, Profile, Wandb
from ..options.named import GradientCompression, LRSchedule
from ..options.precision import Precision
from ..options.recomputation import Recomputation
from ..options.reduction import GradientReduction
from ..options.sparse_attention import SparseAttention
from ..options.zero import Zero
from .engine_sections import RunBatch, RunCheckpoints, RunMonitoring, RunOptimizer, RunSchedule
from .numbers import count, seconds


def _run_name(value: Any) -> Any:
    """Return the name of a run if it can be the name of its folder."""
    if not isinstance(value, str):
        raise ValueError("give a text in quotes")
    if set("/\\") & set(value):
        raise ValueError("it is the name of the run's folder: give one without / and \\")
    return check_folder_name(value)


def _not_empty(value: Any) -> Any:
    """Return a text that has at least one character."""
    if value == "":
        raise ValueError("give a text that is not empty")
    return value


def _replicas(value: Any) -> Any:
    """Return a number of replicas, or ``auto``."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("give a whole number of at least 1, or auto")
    return value


def _folders(value: Any) -> Any:
    """Return a folder, several, or a mixture: folders with weights above 0."""
    if value is None:
        return value
    parts: Any = [value] if isinstance(value, str) else value
    if not isinstance(value, (str, list, tuple, Mapping)) or not parts or not all(isinstance(p, str) for p in parts):
        raise ValueError("give a folder, a list of folders, or {folder: weight}")
    for part in parts:
        path_text(part)
    for folder, weight in value.items() if isinstance(value, Mapping) else ():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {folder} is {describe(weight)}: give a number above 0")
    return list(value) if isinstance(value, tuple) else value


def _some_folders(value: Any) -> Any:
    """Return a folder, several, or a mixture."""
    if value is None:
        raise ValueError("give a folder, a list of folders, or {folder: weight}")
    return _folders(value)


def _names(value: Any) -> Any:
    """Return a mapping whose keys are texts."""
    if not isinstance(value, Mapping):
        raise ValueError("give a section {...}")
    return dict(value)


def _tasks(value: Any) -> Any:
    """Return names of tasks as a tuple, of one or several."""
    names: Any = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("give a task, or a list of tasks, such as [piqa, tasks/mine.yaml]")
    return tuple(names)


def _functions(value: Any) -> Any:
    """Return names of functions, ``file.py:function`` or ``module:function``, of one or several."""
    names: Any = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names:
        raise ValueError("give file.py:function or module:function, or a list of them")
    for name in names:
        if not isinstance(name, str) or not all(name.rpartition(":")[::2]):
            raise ValueError(f"{describe(name)} names no function: give file.py:function or module:function")
    return tuple(names)


def _function(value: Any) -> Any:
    """Return the name of a function, or None."""
    return None if value is None else _functions(value if isinstance(value, str) else [value])[0]


def _deepspeed(value: Any) -> Any:
    """Return a section of DeepSpeed's keys, or the path of a file with one."""
    if not isinstance(value, (str, Mapping, type(None))):
        raise ValueError("give a section, or the path of a JSON file")
    return value


@dataclass(frozen=True, kw_only=True)
class Keys(Options):
    """Base class of the sections of a training file."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSection(Keys):
    """``model.experts``: options of the training of a mixture of experts."""

    balance: tuple[str, ...] | None = option(None, "Load balancing, as of triax.moe.MoE; null: the model's own.")
    bias_rate: float | None = option(None, "Step of the balancing bias; null: the model's own.", above=0.0)
    z_loss: float | None = option(None, "Coefficient of the router's z-loss; null: the model's own.", least=0.0)
    capacity: float | None = option(
        None,
        "Maximum number of tokens of an expert, as a multiple of the mean; null: no limit, no token is dropped.",
        above=0.0,
    )
    shard_tensor: bool | None = option(None, "Shard each expert over tensor ranks too; null: the model's own.")
    lend: int | None = option(
        None,
        "Largest number of experts that a rank borrows from busier ranks of the expert axis; null: none.",
        least=0,
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """The options that are given, as arguments of the model's layers."""
        named = {each.name: getattr(self, each.name) for each in declared(type(self))}
        return {name: list(value) if name == "balance" else value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ModelSection(Keys):
    """``model``: a function of yours that returns the layers, a preset, or a Hugging Face folder or id."""

    MAIN: ClassVar = "layers"

    layers: str | None = option(
        None,
        "Function that returns the list of layers of a configuration, as file.py:function or module:function. Its "
        "argument's default is the configuration, unless preset names one.",
        read=_function,
    )
    preset: str | None = option(None, "Name of a configuration, such as llama3-8b, gpt2 or bytes-small.")
    folder: str | None = option(
        None,
        "Hugging Face folder: config.json and, unless weights is false, *.safetensors; or an id of the Hub, "
        "ORG/NAME or ORG/NAME@REVISION.",
        read=path_text,
    )
    weights: bool = option(True, "false: read only the folder's configuration, and draw random weights from the seed.")
    overrides: dict[str, Any] = option(dict, "Fields of the configuration to change; not with weights.", read=_names)
    attention: Literal["ring", "ulysses", "gather"] = option("ring", "Attention over the context axis.")
    experts: ExpertsSection = option(ExpertsSection(), "Options of a mixture of experts.")

    def check(self) -> None:
        """Check that the model comes from one place."""
        if self.layers is not None and self.folder is not None:
            raise refusal("<folder> has weights of another model than <layers>: leave one of them out")
        if self.layers is None and (self.preset is None) == (self.folder is None):
            given = "none of preset and folder is" if self.preset is None else "both preset and folder are"
            raise refusal(f"{given} given, but the model comes from one: give one of them")
        if self.overrides and self.has_weights:
            raise refusal(
                "<overrides> change the shape that the folder's weights have: leave them out, or set <weights> to false"
            )

    def check_given(self) -> None:
        """Check that weights are not asked for from a preset."""
        if self.folder is None and "weights" in self.given and self.weights:
            raise refusal("<weights> is true, but a preset has none: leave <weights> out, or give <folder>")
        for name in ("attention", "experts") if self.layers is not None else ():
            if name in self.given:
                raise refusal(f"<{name}> is for triax's own models, and <layers> is a function: leave it out")

    @property
    def has_weights(self) -> bool:
        """True if the weights come from a folder."""
        return self.folder is not None and self.weights


_PREFERENCES = ("dpo", "ipo", "simpo", "orpo", "kto")


@dataclass(frozen=True, kw_only=True)
class MethodSection(Keys):
    """``method``: post-training with prompts and answers, in place of the next token of a text."""

    MAIN: ClassVar = "name"
    HAVE: ClassVar[dict[str, tuple[str, ...]]] = {
        "beta": (*_PREFERENCES, "distill", "grpo"),
        "margin": ("simpo",),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "center": ("reward",),
        "teacher": ("distill",),
        "top_k": ("distill",),
        "hard": ("distill",),
        "kind": ("distill", "grpo"),
        "temperature": ("distill", "grpo"),
        "rewards": ("grpo",),
        "reward_weights": ("grpo",),
        "scale_rewards": ("grpo",),
        "group": ("grpo",),
        "max_new_tokens": ("grpo",),
        "steps_per_rollout": ("grpo",),
        "clip": ("grpo",),
        "clip_high": ("grpo",),
        "level": ("grpo",),
        "correct_kl": ("grpo",),
        "reference": ("grpo",),
    }
    NEED: ClassVar[dict[str, tuple[str, ...]]] = {"distill": ("teacher",), "grpo": ("rewards", "max_new_tokens")}
    KINDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "distill": ("reverse", "forward", "jsd"),
        "grpo": ("dapo", "grpo", "dr_grpo"),
    }

    name: Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto", "reward", "distill", "grpo"] = option(
        REQUIRED,
        "sft: learn from answers; dpo, ipo, simpo, orpo: from pairs of answers; kto: from answers with a label; "
        "distill: from a teacher's distribution of the answers' tokens; grpo: from rewards of generated answers; "
        "reward: learn a score from pairs.",
    )
    beta: float | None = option(
        None,
        "dpo, ipo, simpo, orpo, kto: strength of the preference, null: 0.1 (simpo: 2); distill with jsd: share of the "
        "teacher, null: 0.5; grpo: factor of the KL divergence from the reference, null: no KL term.",
        above=0.0,
    )
    margin: float = option(0.0, "simpo: margin by which the better answer should lead (gamma).", least=0.0)
    desirable_weight: float = option(1.0, "kto: weight of the desirable answers.", above=0.0)
    undesirable_weight: float = option(1.0, "kto: weight of the other answers.", above=0.0)
    center: float = option(0.0, "reward: factor of the squared sum of a pair's two scores, such as 0.01.", least=0.0)
    teacher: str | None = option(
        None,
        "distill: a model's folder, its id on the Hub, or a .safetensors file of stored log-probabilities.",
    )
    top_k: int | None = option(
        None, "distill with a model: tokens of the teacher's distribution to keep; null: all.", least=1
    )
    hard: float = option(0.0, "distill: factor of the labels' cross entropy, which is added to the loss.", least=0.0)
    kind: str | None = option(
        None,
        "distill: reverse, forward or jsd, null: reverse; grpo: dapo, grpo or dr_grpo, null: dapo.",
    )
    temperature: float = option(1.0, "distill: divisor of both models' logits; grpo: sampling temperature.", above=0.0)
    rewards: tuple[str, ...] | None = option(
        None, "grpo: reward functions, each file.py:function or module:function.", read=_functions
    )
    reward_weights: tuple[float, ...] | None = option(None, "grpo: weight of each reward function; null: 1.")
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group",
        "grpo: divide advantages by the standard deviation of the group's or the batch's rewards, or do not divide.",
    )
    group: int = option(8, "grpo: answers to generate for each prompt.", least=2)
    max_new_tokens: int | None = option(None, "grpo: maximum number of tokens of an answer.", least=1)
    steps_per_rollout: int = option(1, "grpo: optimizer steps on the answers of one rollout.", least=1)
    clip: float = option(0.2, "grpo: clip ratios below 1 - clip.", above=0.0, below=1.0)
    clip_high: float | None = option(None, "grpo: clip ratios above 1 + clip_high; null: clip.", above=0.0)
    level: Literal["token", "sequence"] = option("token", "grpo: one ratio for each token, or for each answer.")
    correct_kl: bool = option(True, "grpo with beta: multiply the KL term by the ratio.")
    reference: str | None = option(
        None,
        "grpo with beta: the reference model's folder or id; null: the model that training starts from.",
        needs="beta",
    )

    def check_given(self) -> None:
        """Check that the method has the options that are given."""
        for name, methods in self.HAVE.items():
            if name in self.given and self.name not in methods:
                raise refusal(f"<{name}> belongs to {', '.join(methods)}, and <name> is {self.name}: leave it out")
        if self.name == "distill" and self.beta is not None and self.loss_kind != "jsd":
            raise refusal(f"<beta> belongs to the kind jsd, and <kind> is {self.loss_kind}: leave it out")
        if "correct_kl" in self.given and self.beta is None:
            raise refusal("<correct_kl> has no effect without <beta>: leave it out")

    def check(self) -> None:
        """Check that what the method cannot do without is there, and that it has the kind."""
        for name in self.NEED.get(self.name, ()):
            if getattr(self, name) is None:
                raise refusal(f"<name> is {self.name}, which needs <{name}>: give it")
        kinds = self.KINDS.get(self.name, ())
        if self.kind is not None and kinds and self.kind not in kinds:
            raise refusal(f"<kind> is {self.kind}, which {self.name} does not have; {nearest(self.kind, kinds)}")
        if self.name == "distill" and self.beta is not None and self.beta >= 1:
            raise refusal(f"<beta> is {self.beta}, but jsd needs a number below 1, such as 0.5")
        if self.is_stored and self.top_k is not None:
            raise refusal("<teacher> is a file, which has its own number of tokens: leave <top_k> out")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards or ()):
            raise refusal(
                f"<reward_weights> has {len(self.reward_weights)} numbers for {len(self.rewards or ())} functions of "
                "<rewards>: give one for each"
            )

    @property
    def form(self) -> Literal["sft", "pairs", "unpaired", "scored", "prompts"]:
        """Form of the samples, as of ``triax.data.Answers``; ``prompts`` are of ``triax.data.Prompts``."""
        if self.name in ("sft", "distill"):
            return "sft"
        if self.name == "grpo":
            return "prompts"
        return "unpaired" if self.name == "kto" else "scored" if self.name == "reward" else "pairs"

    @property
    def strength(self) -> float:
        """The beta of a preference that holds."""
        return self.beta or (2.0 if self.name == "simpo" else 0.1)

    @property
    def loss_kind(self) -> str:
        """The kind of distill and grpo that holds."""
        return self.kind or self.KINDS[self.name][0]

    @property
    def is_stored(self) -> bool:
        """True if the teacher is a file of log-probabilities."""
        return self.teacher is not None and self.teacher.endswith(".safetensors")


@dataclass(frozen=True, kw_only=True)
class DataSection(Keys):
    """``data``: folders of tokens, or text, which is tokenized first; with a method, files of prompts and answers."""

    MAIN: ClassVar = "training"

    training: Any = option(
        REQUIRED,
        "Folder of tokens, which triax data tokenize writes, or text: a file, or hf://datasets/ORG/NAME; a list of "
        "them, or a mixture {folder: weight}. With a method: JSON lines, Parquet or Arrow files, or folders of them.",
        read=_some_folders,
    )
    held_out: float | None = option(None, "Share of the documents to hold out for evaluation.", above=0.0, below=1.0)
    validation: Any = option(
        None, "Folder or folders of tokens, or text, for evaluation, instead of held_out.", read=_folders
    )
    packing: Literal["cut", "whole"] | None = option(
        None,
        "cut: a document may continue in the next row; whole: rows are padded, and only documents longer than a row "
        "are cut; null: whole for chat, else cut.",
    )
    images: bool = option(
        False,
        "The samples have images, in the column images or image; with method sft, and the folder of a vision-language "
        "model: docs/guides/vision-language.md.",
    )
    document_mask: bool = option(True, "Tokens attend within their document only.")
    shuffle: bool = option(True, "Shuffle documents and rows in each epoch; false: the folder's own order.")
    threads: int = option(1, "Threads that make batches ahead; 0: none.", least=0, most=THREADS)

    def check(self) -> None:
        """Check that one option says what to evaluate on."""
        if self.held_out is not None and self.validation is not None:
            raise refusal("<held_out> and <validation> both say what to evaluate on: give one of them")


@dataclass(frozen=True, kw_only=True)
class GridSection(Keys):
    """``grid``: sizes of the axes."""

    pipe: int = option(1, "Stages of layers.", least=1)
    data: int | Literal["auto"] = option(
        "auto", "Replicas; auto: number of processes divided by the other axes.", read=_replicas
    )
    context: int = option(1, "Parts of each sequence.", least=1)
    tensor: int = option(1, "Shards of each layer.", least=1)
    expert: int = option(1, "Shards of the experts, within the data axis.", least=1)
    sequence_parallel: bool = option(False, "Norms and dropout on the tensor ranks' shares of a sequence.")


@dataclass(frozen=True, kw_only=True)
class LearningRateSection(Keys):
    """``training.learning_rate``: a number, which is the peak, or a section."""

    MAIN: ClassVar = "peak"

    peak: float = option(3e-4, "Highest learning rate.", above=0.0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "Rates after the warmup. wsd: warmup, stable, decay: constant, then linear over the last decay_steps."
    )
    warmup_steps: int | None = option(None, "Steps of a linear warmup; null: 1 % of the steps.", least=0)
    warmup_tokens: int | None = option(None, "Tokens of the warmup, instead of warmup_steps.", read=count)
    minimum: float = option(0.1, "Last rate, as a share of the peak.", least=0.0, most=1.0)
    decay_steps: int | None = option(None, "For wsd: steps of the decay at the end; null: 10 % of the steps.", least=1)

    def check(self) -> None:
        """Check the options against the schedule."""
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            raise refusal("<warmup_steps> and <warmup_tokens> both say how long the warmup is: give one of them")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise refusal(f"<decay_steps> belongs to schedule wsd, and the schedule is {self.schedule}: leave it out")

    def check_given(self) -> None:
        """Check that a constant schedule has no minimum."""
        if self.schedule == "constant" and "minimum" in self.given:
            raise refusal("<minimum> has no effect on schedule constant, whose rate stays: leave it out")


@dataclass(frozen=True, kw_only=True)
class SpikesSection(Keys):
    """``training.spikes``: what happens when the loss or the gradient norm jumps."""

    MAIN: ClassVar = "action"

    action: Literal["none", "warn", "skip", "rewind"] = option(
        "warn",
        "warn: print it; skip: take no step with this batch; rewind: continue from the last checkpoint, without these "
        "batches.",
    )
    loss: float = option(6.0, "A loss is a spike if it is more than this many deviations above the median.", above=0.0)
    norm: float = option(10.0, "A gradient norm is a spike if it is more than this many times the median.", above=1.0)
    window: int = option(100, "Number of steps for the median and the deviation.", least=2)
    limit: int = option(3, "Number of rewinds, after which the run ends with an error.", least=1)


@dataclass(frozen=True, kw_only=True)
class TrainingSection(Keys):
    """``training``: how long, on which sequences, and at which learning rate."""

    steps: int | None = option(None, "Optimizer steps.", least=1)
    tokens: int | None = option(None, "Tokens to train on, instead of steps: 1e9 or 1B.", read=count)
    epochs: float | None = option(None, "Times through the documents, instead of steps.", above=0.0)
    sequence: int | None = option(None, "Tokens of a sequence; null: the model's longest.", least=1)
    learning_rate: LearningRateSection = option(LearningRateSection(), "The learning rate: its peak, or a section.")
    time_limit: float | None = option(
        None, "Time after which the run saves and ends: 90m, 2h30m; null: none.", read=seconds
    )
    spikes: SpikesSection = option(SpikesSection(), "Jumps of the loss or the gradient norm: an action, or a section.")

    def check(self) -> None:
        """Check that one option says how long the run is."""
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) > 1:
            names = " and ".join(f"<{name}>" for name in given)
            raise refusal(f"{names} all say how long the run is: give one of them")


@dataclass(frozen=True, kw_only=True)
class EvaluateSection(Keys):
    """``evaluate``: the loss on held-out documents, and metrics of tasks."""

    every: int = option(100, "Evaluate every N steps, and at the end.", least=1)
    sequences: int | None = option(256, "Number of sequences to evaluate on, the first ones; null: all.", least=1)
    tasks: tuple[str, ...] = option(
        (),
        "Tasks of lm-eval to evaluate on too: names, groups, or paths of task files: docs/guides/lm-eval.md.",
        read=_tasks,
    )
    task_samples: int | None = option(None, "Number of samples of each task, the first ones; null: all.", least=1)
    confirm_run_unsafe_code: bool = option(False, "Run Python code of task files, and tasks that run answers.")
    metric: str = option("loss", "Metric that best and patience compare: loss, or a metric of tasks, such as piqa/acc.")
    best: bool = option(False, "Keep the model of the best metric, as a Hugging Face folder: best in the run's folder.")
    patience: int | None = option(
        None,
        "End the run after this many consecutive evaluations without a new best metric; null: never.",
        least=1,
    )

    def check(self) -> None:
        """Check that options of tasks have tasks."""
        if not self.tasks and self.task_samples is not None:
            raise refusal("<task_samples> has no effect without <tasks>: leave it out, or give tasks")
        if not self.tasks and self.metric != "loss":
            raise refusal(f"<metric> is {self.metric}, and there are no <tasks>: give tasks, or leave it out")


@dataclass(frozen=True, kw_only=True)
class SampleSection(Keys):
    """``sample``: a text that the model writes after each evaluation."""

    prompt: str = option(REQUIRED, "Beginning of the text.", read=_not_empty)
    tokens: int = option(100, "Tokens to add, if there is room.", least=1)
    temperature: float = option(0.7, "Sampling temperature; 0: always take the most likely token.", least=0.0)


@dataclass(frozen=True, kw_only=True)
class ExportSection(Keys):
    """``export``: the model as a Hugging Face folder."""

    folder: str | None = option(None, "Folder; null: model in the run's folder.", read=path_text)
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = option(
        None, "Dtype of the written weights; null: the dtype of the training."
    )


@dataclass(frozen=True, kw_only=True)
class TrainingFile(EngineOptions):
    """All keys of the file of ``triax train``: an engine's options, and what only a run has."""

    TITLE: ClassVar[str] = "the training file"

    batch: RunBatch = option(RunBatch(), "Samples of a step: their number, or a section.")
    optimizer: RunOptimizer = option(RunOptimizer(), "The optimizer: a name, or type and arguments.")
    lr_scheduler: LRSchedule | None = option(
        None, "Learning-rate schedule by name, in place of training.learning_rate: type and arguments."
    )
    schedule: RunSchedule = option(RunSchedule(), "The pipeline schedule: a name, or a section.")
    zero: Zero = option(Zero(stage=1), "Stage of ZeRO, or a section.")
    clip: float | None = option(1.0, "Limit of the global gradient norm; null: no limit.", above=0.0)
    compression: GradientCompression | None = option(
        None, "Compression of the gradients' sum, in ZeRO stages 0 and 1: type and arguments."
    )
    checkpoint: RunCheckpoints = option(RunCheckpoints(), "Checkpoints: every how many steps, or a section.")
    monitor: RunMonitoring = option(RunMonitoring(), "What is printed and recorded.")
    tuning: None = None  # a run's schedule is known before its engine measures
    seed: int = option(0, "Seed of weights, dropout, the order of data and the sample.", least=0, below=SEEDS)

    name: str = option("run", "Name of the run: its folder in runs.", read=_run_name)
    runs: str = option("runs", "Folder of all runs.", read=path_text)
    model: ModelSection = option(REQUIRED, "The model.")
    tokenizer: str | None = option(
        None,
        "Tokenizer: its folder, its tokenizer.json, its id on the Hub, or bytes; null: the model's, or the data's.",
    )
    data: DataSection = option(REQUIRED, "The data: a folder of tokens, or a section.")
    method: MethodSection | None = option(
        None, "Post-training on prompts and answers: a name, or a section; null: the next token of texts."
    )
    grid: GridSection = option(GridSection(), "Sizes of the axes.")
    training: TrainingSection = option(TrainingSection(), "How long, on which sequences, at which learning rate.")
    evaluate: EvaluateSection = option(EvaluateSection(), "The loss on held-out documents.")
    sample: SampleSection | None = option(None, "A text after each evaluation; null: none.")
    export: ExportSection | None = option(
        ExportSection(), "The model as a Hugging Face folder at the end; false: none."
    )
    deepspeed: Any = option(
        None,
        "A DeepSpeed configuration, a section or a path, whose keys are taken as they are: docs/config.md.",
        read=_deepspeed,
    )

    def check(self) -> None:
        """Check that a run which rewinds has checkpoints, and that replicas that come and go can take the steps."""
        super().check()
        rate = sorted(self.training.learning_rate.given - {"peak"})
        if self.lr_scheduler is not None and rate:
            raise refusal(
                f"<lr_scheduler> and <training.learning_rate.{rate[0]}> both set the rate of each step: give one"
            )
        if self.fault_tolerance is not None:
            self._check_replicas()
        if self.checkpoint.every is None and self.training.spikes.action == "rewind":
            raise refusal(
                "<training.spikes> is rewind, but <checkpoint> is false, so that there is nothing to go back to: leave "
                "<checkpoint> out, or write skip"
            )

    def _check_replicas(self) -> None:
        """Check the other sections against ``fault_tolerance``."""
        training = self.training
        given = {
            "tokens": training.tokens,
            "epochs": training.epochs,
            "learning_rate.warmup_tokens": training.learning_rate.warmup_tokens,
        }
        for key in (key for key, value in given.items() if value is not None):
            raise refusal(
                f"<training.{key}> does not fix a number of steps with <fault_tolerance>, whose replicas change: give "
                f"<training.{'steps' if '.' not in key else 'learning_rate.warmup_steps'}>"
            )
        if training.time_limit is not None:
            raise refusal(
                "<training.time_limit> would end each replica at a different step with <fault_tolerance>: give "
                "<training.steps>, and end the run by SIGTERM to triax run"
            )
        if training.spikes.action == "rewind":
            raise refusal(
                "<training.spikes> rewind goes back to a checkpoint, which a replica that has joined does not have "
                "with <fault_tolerance>: write skip"
            )
        if self.method is not None and self.method.name != "sft":
            raise refusal(
                f"<method> {self.method.name} does not work with <fault_tolerance>, which gives each replica its "
                "samples by number: write sft, or leave one out"
            )
        if self.schedule.searched and self.schedule.layer_costs is None:
            raise refusal(
                f"<schedule.partition> {self.schedule.partition} measures the layers, and replicas of "
                "<fault_tolerance> would be cut differently: give <schedule.layer_costs>, or write parameters"
            )


# Sections that docs/reference/options.md lists key by key.
WHOLE = (
    *(Zero, Precision, GradientReduction, Recomputation, Compile, LocalSGD, FaultTolerance, Lora, SparseAttention),
    *(Wandb, Profile, CommunicationLog, GradientCompression, LRSchedule),
)
