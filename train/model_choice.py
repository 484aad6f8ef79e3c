"""The model of a training file: a preset, a folder or a function of layers, with overrides; and what must fit it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ..base.errors import ConfigError, nearest, no_such, to_install
from ..base.hub import local_folder
from ..base.named_function import named_function
from ..base.option_error import OptionError
from ..grid.topology import Topology
from ..models.config import CONFIGS, EncoderConfig, TransformerConfig, config_from_fields
from ..models.encoder_decoder_config import EncoderDecoderFields
from ..models.huggingface.config import from_hf, is_reward, read_config
from ..pipe.partition import boundaries
from ..pipe.program.schedule import Schedule
from ..pipe.program.slices import require_slices
from .sections import ModelSection, TrainingFile

# Fields of the language model of a model of images and text.
_SIZES = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")


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
            read = read_config(folder)
            if "vision_config" in read:
                raise ConfigError("it takes images: a training file trains it with data.images: true and method: sft")
            found = from_hf(read, folder / "config.json")
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
    has_export = "export" in file.given and file.export is not None
    more = {"export": has_export, "evaluate.best": file.evaluate.best}
    _require_any_layers_do(file, "model.layers is a function", more)
    if file.method is None and "document_mask" not in file.data.given:
        raise ConfigError(
            "data.document_mask is true, for which the first layer of model.layers gets a pair of tokens and document "
            "numbers: write false, or true if your layers take the pair"
        )
    return _with_overrides(section, found, f"model.layers {section.layers}")


def image_config(file: TrainingFile) -> TransformerConfig:
    """Return the configuration of the model of a file with ``data.images``.

    Raises:
        ConfigError: the folder is of no such model, or the file asks for what its layers cannot do.
    """
    section = file.model
    if section.folder is None or file.method is None:
        raise ConfigError("data.images needs the folder of a vision-language model, and a method: write method: sft")
    overrides = {"model.overrides": bool(section.overrides)}
    _require_any_layers_do(file, "data.images takes the layers of transformers", overrides)
    try:
        import PIL  # noqa: F401

        text = hf_config(section).get_text_config()
        layer_count(file, text)  # refuses models that hf_layers does not run
    except ImportError as error:
        raise ConfigError(f"data.images needs transformers and Pillow. Type {to_install('images')}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.folder {section.folder}: {error}") from error
    return TransformerConfig(**{name: getattr(text, name) for name in _SIZES})


def hf_config(section: ModelSection) -> Any:
    """Return transformers' configuration of the folder of a model of images and text.

    Raises:
        ValueError: the folder has another model.
    """
    from transformers import AutoConfig

    from ..models.huggingface.padded_layers import PADDED_FAMILIES  # needs torch

    folder = local_folder(str(section.folder))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not hasattr(config, "vision_config"):
        raise ValueError(f"data.images is for models of images and text, and this is a {config.model_type}")
    if config.model_type in PADDED_FAMILIES:
        raise ValueError(
            f"data.images does not make the rows of a {config.model_type}: train it with triax.Engine "
            "(docs/guides/vision-language.md)"
        )
    return config


def _require_any_layers_do(file: TrainingFile, origin: str, more: Mapping[str, bool]) -> None:
    """Check that a file with layers that are not triax's own does not ask for what they cannot do.

    Args:
        file: the training file.
        origin: the layers' origin, in words.
        more: further keys, and whether they are asked for.
    """
    asked = {
        **more,
        "sample": file.sample is not None,
        "evaluate.tasks": bool(file.evaluate.tasks),
        "grid.sequence_parallel": file.grid.sequence_parallel,
        "grid.context": file.grid.context > 1,
        "method": file.method is not None and file.method.name != "sft",
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"{key} works with triax's own models, and {origin}: leave {key} out")


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


def layer_count(file: TrainingFile, model: TransformerConfig) -> int:
    """Return the number of entries in the list of layers."""
    if file.data.images:
        from ..models.huggingface.pipeline_layers import hf_layers  # needs torch

        return len(hf_layers(hf_config(file.model)))
    return model.layer_count if file.model.layers is None else len(layers_function(file.model)(model))


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
    if file.data.images:
        return "data.images has images, whose tokens belong to whole sequences"
    if file.method is not None and file.method.name != "sft":
        return f"method {file.method.name} has a loss of whole sequences"
    return None if file.compile is None else "compile would compile each layer again for each slice"


def require_model_fits(
    file: TrainingFile, model: TransformerConfig, topology: Topology, schedule: Schedule, sequence: int, count: int
) -> None:
    """Check that the model can be cut as the grid asks, and has positions for the sequence."""
    tensor, expert = topology.size("tensor"), topology.expert
    if isinstance(model, EncoderConfig | EncoderDecoderFields):
        raise ConfigError(
            "model: a training file has next tokens, and an encoder trains on masked tokens or on classes, a T5 on "
            "pairs of texts, a Whisper on pairs of sound and text: train it with triax.Engine (docs/models.md, "
            "'Encoders')"
        )
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


def is_reward_model(section: ModelSection) -> bool:
    """Return True if the folder is of a model with scores instead of logits."""
    return section.has_weights and is_reward(read_config(local_folder(str(section.folder))))
