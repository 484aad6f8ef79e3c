"""A configuration whose "auto" values come from Hugging Face's ``TrainingArguments``, as in its DeepSpeed integration.

transformers 5 fills in a ``ds_config.json`` in two passes (integrations/deepspeed.py): one when the arguments are made,
one when the model and the number of steps are known. This file does the same for triax's configuration, and reports all
mismatches with the arguments together. It needs neither torch nor transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...base.errors import ConfigError, describe, to_install
from ...base.foreign_tables import answers, read_table
from ...base.json_comments import parse, read_json

# Keys of the section checkpoint, and the Trainer's arguments that replace them.
_TRAINER_ARGUMENTS = answers(read_table(__file__, "arguments.toml")["checkpoint"])

# Keys whose "auto" has no value without a Trainer.
_TRAINERS_ALONE = (
    "optimizer.params.lr",
    "scheduler.params.total_num_steps",
    "scheduler.params.warmup_num_steps",
    "fp16.enabled",
    "bf16.enabled",
)
# Values like those of TrainingArguments, with which a configuration is checked before there are any.
_STAND_INS = SimpleNamespace(
    per_device_train_batch_size=1,
    gradient_accumulation_steps=1,
    max_grad_norm=1.0,
    learning_rate=5e-5,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
    weight_decay=0.0,
    fp16=False,
    bf16=False,
    seed=42,
    get_warmup_steps=lambda steps: 0,
)


class AutoValues:
    """A configuration of which the "auto" values are being filled in.

    Args:
        source: a dict, the path of a JSON file (comments are allowed), or JSON. It is not changed.

    Attributes:
        config: the configuration, with the values filled in so far.
        mismatches: one line for each value that disagrees with the arguments.
        origins: dotted key that was "auto" or missing -> where the Trainer takes its value from.

    Raises:
        ConfigError: the file cannot be read, or is no dict.
    """

    def __init__(self, source: Mapping[str, Any] | str | Path) -> None:
        if isinstance(source, (str, Path)):
            is_json = str(source).lstrip().startswith("{")  # JSON text, for a command line
            source = parse(str(source), "given as JSON") if is_json else read_json(source)
        if not isinstance(source, Mapping):
            raise ConfigError(f"the configuration is a {type(source).__name__}: give a dict or the path of a JSON file")
        self._source: dict[str, Any] = copy.deepcopy(dict(source))
        if "bfloat16" in self._source and "bf16" not in self._source:
            self._source["bf16"] = self._source.pop("bfloat16")  # an older name
        self.config: dict[str, Any] = copy.deepcopy(self._source)
        self.mismatches: list[str] = []
        self.origins: dict[str, str] = {}

    @property
    def tensor(self) -> int:
        """Size of the tensor axis in the configuration: ``tensor_parallel.autotp_size`` or ``tp_size``, or 1."""
        section = self.config.get("tensor_parallel")
        section = section if isinstance(section, Mapping) else {}
        for key in ("autotp_size", "tp_size"):
            size = section.get(key) or 0
            if not isinstance(size, int) or isinstance(size, bool):
                raise ConfigError(f"tensor_parallel.{key}: give a whole number, not {describe(size)}")
            if size:
                return size
        return 1

    def from_arguments(self, args: Any, replicas: int) -> None:
        """Fill in the values that depend on the arguments alone. Each call starts again from the source.

        In addition to Hugging Face's integration: batch sizes, ``gradient_clipping``, precision and seed that are
        missing in the configuration are taken from the arguments, so that ``--bf16`` and ``--max_grad_norm`` act.

        Args:
            args: ``transformers.TrainingArguments``.
            replicas: size of the data axis.
        """
        self.config, self.mismatches = copy.deepcopy(self._source), []
        micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
        self.match("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
        self.match("gradient_accumulation_steps", steps, "gradient_accumulation_steps")
        self.match("train_batch_size", replicas * micro * steps, f"{replicas} replicas * {micro} * {steps}")
        self.match("gradient_clipping", float(args.max_grad_norm or 0.0), "max_grad_norm")
        self.match("optimizer.params.lr", args.learning_rate, "learning_rate")
        self.match("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1 and adam_beta2")
        self.match("optimizer.params.eps", args.adam_epsilon, "adam_epsilon")
        self.match("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
        self.fill("scheduler.params.warmup_min_lr", 0, "0")
        self.match("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")
        for key in ("fp16", "bf16"):
            if isinstance(self.config.setdefault(key, {}), dict):
                self.config[key].setdefault("enabled", "auto")
            self.match(f"{key}.enabled", bool(getattr(args, key)), key)
        for key, value, argument in (
            ("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size"),
            ("gradient_accumulation_steps", steps, "gradient_accumulation_steps"),
            ("gradient_clipping", float(args.max_grad_norm or 0.0), "max_grad_norm"),
            ("seed", args.seed, "seed"),
        ):
            if key not in self.config:
                self.config[key], self.origins[key] = value, argument

    def from_run(
        self, args: Any, hidden_size: int | None, steps: int | None, *, compare: bool = True
    ) -> dict[str, Any]:
        """Fill in the values that depend on the model and the length of the run.

        Args:
            args: ``transformers.TrainingArguments``, as in ``from_arguments``.
            hidden_size: the model's hidden size, the largest of several; None: unknown.
            steps: optimizer steps of the run. None: evaluation only, without optimizer, scheduler and master weights,
                so that the model computes in its own dtype, and in stage 0 of ZeRO.
            compare: raise an error for values that disagree with the arguments.

        Returns:
            The configuration. The method may be called again, for another run.

        Raises:
            ConfigError: values that disagree with the arguments, all in one message; an "auto" value that needs an
                unknown hidden size; or a key that the Trainer's own arguments decide.
        """
        run = AutoValues(self.config)
        run.mismatches, run.origins = list(self.mismatches), self.origins
        if steps is None:
            for key in ("optimizer", "scheduler", "fp16", "bf16", "compile"):
                run.config.pop(key, None)
            run.config["zero_optimization"] = {"stage": 0}
        from_hidden_size = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        keys = [f"zero_optimization.{key}" for key in from_hidden_size]
        unknown = [key for key in keys if run.get(key) == "auto"]
        if unknown and hidden_size is None:
            raise ConfigError(
                f'{", ".join(unknown)}: "auto" depends on hidden_size, which this model\'s config does not have: write '
                "numbers"
            )
        if hidden_size is not None:
            run.fill("zero_optimization.reduce_bucket_size", hidden_size * hidden_size, "the model's hidden_size ** 2")
            if run.get("zero_optimization.stage") == 3:
                prefetch, persistent = int(0.9 * hidden_size * hidden_size), 10 * hidden_size
                run.fill("zero_optimization.stage3_prefetch_bucket_size", prefetch, "0.9 * hidden_size ** 2")
                run.fill("zero_optimization.stage3_param_persistence_threshold", persistent, "10 * hidden_size")
        if steps is not None:
            run.match("scheduler.params.total_num_steps", steps, "the number of training steps")
            run.match("scheduler.params.warmup_num_steps", max(1, args.get_warmup_steps(steps)), "warmup_steps")
        for key, instead in _TRAINER_ARGUMENTS.items():
            if run.get(f"checkpoint.{key}"):
                raise ConfigError(
                    f"checkpoint.{key} has no effect here, because the Trainer decides when checkpoints are written "
                    f"and read: leave it out, and use the Trainer's {instead}"
                )
        if run.mismatches and compare:
            lines = "\n".join(run.mismatches)
            raise ConfigError(
                f"the configuration and the TrainingArguments disagree:\n{lines}\nWrite one value in both places, or "
                '"auto" in the configuration'
            )
        return run.config

    def get(self, key: str) -> Any:
        """Return the value of a dotted key; None if it is missing."""
        section, name = self._section(key)
        return None if section is None else section.get(name)

    def fill(self, key: str, value: Any, origin: str) -> None:
        """Set a dotted key to a value if it is "auto", and note where the value comes from."""
        section, name = self._section(key)
        if section is not None and section.get(name) == "auto":
            section[name], self.origins[key] = value, origin

    def match(self, key: str, value: Any, argument: str) -> None:
        """Set a dotted key to a value if it is "auto". If it has a different value, note a mismatch.

        Args:
            key: the dotted key.
            value: the value that follows from the Trainer's arguments.
            argument: name of the argument, for the message.
        """
        self.fill(key, value, argument)
        given = self.get(key)
        if given is not None and given != value:
            self.mismatches.append(f"- {key} is {describe(given)}; {argument} is {describe(value)}")

    def _section(self, key: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that a dotted key lies in, None if it is missing, and the key's last name."""
        *sections, name = key.split(".")
        inner: Any = self.config
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        return (inner if isinstance(inner, dict) else None), name


def trainer_values(source: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a Trainer's configuration with stand-ins for what the Trainer fills in, and the origin of each of them.

    Args:
        source: the configuration, with "auto" values.

    Returns:
        A configuration that can be checked, and dotted key -> where the Trainer takes it from. If no value of the
        source needs a Trainer: the source, and no keys.
    """
    values = AutoValues(source)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = [values.get(key) for key in sizes]
    if given != ["auto"] * 3 and not any(values.get(key) == "auto" for key in _TRAINERS_ALONE):
        return dict(source), {}
    values.from_arguments(_STAND_INS, 1)
    config = values.from_run(_STAND_INS, 1, 1, compare=False)
    if "train_batch_size" in values.origins:
        values.origins["train_batch_size"] = "replicas * per_device_train_batch_size * gradient_accumulation_steps"
    numbers = any(isinstance(size, int) for size in given)
    for key in sizes[: None if numbers else 1]:  # it follows from those that are given
        if key in values.origins:
            del config[key]
    return config, values.origins


def hidden_size(model_config: Any) -> int | None:
    """Return the hidden size in a model's ``config``, the largest of several; None if it has none."""
    for config in (model_config, getattr(model_config, "text_config", None)):
        if getattr(config, "hidden_size", None) is not None:
            return int(config.hidden_size)  # type: ignore[union-attr]
        if getattr(config, "hidden_sizes", None):
            return int(max(config.hidden_sizes))  # type: ignore[union-attr]
    return None


def missing_extra(missing: ImportError) -> ImportError:
    """Return the error for a missing package of the extra ``hf``."""
    return ImportError(
        f"triax.Trainer and TrainingArguments need transformers and accelerate ({missing}): {to_install('hf')}"
    )
