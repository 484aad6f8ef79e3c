"""A configuration whose "auto" values come from Hugging Face's ``TrainingArguments``, as in its DeepSpeed integration.

What transformers 5 does with a ``ds_config.json`` is in its integrations/deepspeed.py, in two steps: one when the
arguments are made, one when the model and the number of steps are known. Here they are again, for triax's checked
configuration, with the values that disagree reported together. No torch and no transformers are needed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config_base import ConfigError, describe
from .config_text import parse

_BY_THE_TRAINER = {
    "dir": "output_dir",
    "every": "save_steps",
    "keep": "save_total_limit",
    "resume": "train(resume_from_checkpoint=True)",
    "async": "nothing",
}


class Filling:
    """One configuration on its way from "auto" to values.

    Args:
        source: a dict, or the path of a JSON file (with comments, if it has any).

    Attributes:
        config: what has been filled in so far; the source stays as it was.
        mismatches: lines about values that disagree with the arguments.

    Raises:
        ConfigError: the file cannot be read, or is not a section.
    """

    def __init__(self, source: Mapping[str, Any] | str | Path) -> None:
        if isinstance(source, (str, Path)):
            source = _read(str(source))
        if not isinstance(source, Mapping):
            raise ConfigError(f"the configuration is a {type(source).__name__}: give a dict or the path of a JSON file")
        self._source: dict[str, Any] = copy.deepcopy(dict(source))
        if "bfloat16" in self._source and "bf16" not in self._source:
            self._source["bf16"] = self._source.pop("bfloat16")  # an older name
        self.config: dict[str, Any] = copy.deepcopy(self._source)
        self.mismatches: list[str] = []

    @property
    def tensor(self) -> int:
        """How many tensor ranks it asks for; 1 where it does not say."""
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
        """The first step: what the arguments alone say. Called again, it begins anew: they may have changed since.

        Beyond Hugging Face's: the sizes of the batch, ``gradient_clipping``, the precision and the seed are taken from
        the arguments where the configuration does not have them, so that ``--bf16`` and ``--max_grad_norm`` act.

        Args:
            args: ``transformers.TrainingArguments``.
            replicas: of the data axis.
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
        self.fill("scheduler.params.warmup_min_lr", 0)
        self.match("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")
        for key in ("fp16", "bf16"):
            if isinstance(self.config.setdefault(key, {}), dict):
                self.config[key].setdefault("enabled", "auto")
            self.match(f"{key}.enabled", bool(getattr(args, key)), key)
        self.config.setdefault("train_micro_batch_size_per_gpu", micro)
        self.config.setdefault("gradient_accumulation_steps", steps)
        self.config.setdefault("gradient_clipping", float(args.max_grad_norm or 0.0))
        self.config.setdefault("seed", args.seed)

    def from_run(self, args: Any, hidden_size: int | None, steps: int | None) -> dict[str, Any]:
        """The second step: what depends on the model and on how long the run is.

        Args:
            args: as before.
            hidden_size: the model's, the largest if it has several; None: it does not say.
            steps: optimizer steps of the run; None: nothing is trained: no optimizer, no scheduler, and no masters, so
                that the model computes in the dtype that it has; and stage 0 of ZeRO: it is whole on each replica.

        Returns:
            The whole configuration. This object may be asked again, for another run.

        Raises:
            ConfigError: values that disagree with the arguments, all of them; a width that is needed and not known; or
                what the Trainer's own arguments decide.
        """
        run = Filling(self.config)
        run.mismatches = list(self.mismatches)
        if steps is None:
            for key in ("optimizer", "scheduler", "fp16", "bf16"):
                run.config.pop(key, None)
            run.config["zero_optimization"] = {"stage": 0}
        zero = run.config.get("zero_optimization")
        stage3 = isinstance(zero, Mapping) and zero.get("stage") == 3
        by_width = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        asking = [f"zero_optimization.{key}" for key in by_width if run.get(f"zero_optimization.{key}") == "auto"]
        if asking and hidden_size is None:
            keys = ", ".join(asking)
            raise ConfigError(f'{keys}: "auto" follows from hidden_size, and the model has none: write numbers')
        if hidden_size is not None:
            run.fill("zero_optimization.reduce_bucket_size", hidden_size * hidden_size)
            if stage3:
                run.fill("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden_size * hidden_size))
                run.fill("zero_optimization.stage3_param_persistence_threshold", 10 * hidden_size)
        if steps is not None:
            run.match("scheduler.params.total_num_steps", steps, "the number of training steps")
            run.match("scheduler.params.warmup_num_steps", max(1, args.get_warmup_steps(steps)), "warmup_steps")
        run._refuse()
        if run.mismatches:
            lines = "\n".join(run.mismatches)
            raise ConfigError(
                f"the configuration and the TrainingArguments disagree:\n{lines}\nWrite one value in both places, or "
                '"auto" in the configuration'
            )
        return run.config

    def get(self, key: str) -> Any:
        """What a dotted key has; None where it is not there."""
        section, name = self._section(key)
        return None if section is None else section.get(name)

    def fill(self, key: str, value: Any) -> None:
        """Where a dotted key is there and "auto", this is its value."""
        section, name = self._section(key)
        if section is not None and section.get(name) == "auto":
            section[name] = value

    def match(self, key: str, value: Any, argument: str) -> None:
        """As ``fill``; and a value that is there and another one is a mismatch."""
        self.fill(key, value)
        found = self.get(key)
        if found is not None and found != value:
            self.mismatches.append(f"- {key} is {describe(found)}; {argument} is {describe(value)}")

    def _section(self, key: str) -> tuple[dict[str, Any] | None, str]:
        *sections, name = key.split(".")
        found: Any = self.config
        for section in sections:
            found = found.get(section) if isinstance(found, dict) else None
        return (found if isinstance(found, dict) else None), name

    def _refuse(self) -> None:
        section = self.config.get("checkpoint")
        for key, instead in _BY_THE_TRAINER.items():
            if isinstance(section, Mapping) and section.get(key):
                raise ConfigError(
                    f"checkpoint.{key}: the Trainer says when checkpoints are written and read: leave it out, and use "
                    f"{instead} of its own"
                )


def hidden_size(model_config: Any) -> int | None:
    """A model's width, by its ``config``: the largest, where there are several; None: it does not say."""
    for config in (model_config, getattr(model_config, "text_config", None)):
        if getattr(config, "hidden_size", None) is not None:
            return int(config.hidden_size)  # type: ignore[union-attr]
        if getattr(config, "hidden_sizes", None):
            return int(max(config.hidden_sizes))  # type: ignore[union-attr]
    return None


def wanted(missing: ImportError) -> ImportError:
    """What to say where the packages of the extra are not installed."""
    return ImportError(
        f"triax.Trainer and TrainingArguments need transformers and accelerate ({missing}): pip install 'triax[hf]'"
    )


def _read(source: str) -> Any:
    if source.lstrip().startswith("{"):  # JSON itself, as on a command line
        return parse(source, "given as JSON")
    try:
        return parse(Path(source).read_text(encoding="utf-8"), source)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {source} cannot be read: {error}") from error
