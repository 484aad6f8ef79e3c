"""Files and settings beside the weights in a model's folder: special tokens, generation settings, the tokenizer.

They go with a model from the folder or the live model that ``load_hf`` read, through checkpoints, to the folder that
``save_hf`` or ``triax checkpoint export --format hf`` writes, so that generation ends where it ended before.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.files import read_object
from ...base.hub import local_folder

# The settings are plain JSON, which a checkpoint keeps:
#     family: model_type
#     tokens: the keys of config.json with the ids of special tokens
#     labels: the keys with the names of the classes, and their problem_type
#     generation: the content of generation_config.json, or None
#     tokenizer: the folder with the tokenizer's files, or None
Settings = dict[str, Any]

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LABELS = ("id2label", "label2id", "problem_type")
_GENERATION = "generation_config.json"
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),  # of images
)


def settings_of_folder(folder: Path, config: Mapping[str, Any]) -> Settings:
    """Return the settings of a folder whose ``config.json`` has the given content."""
    file = folder / _GENERATION
    generation = read_object(file) if file.is_file() else None
    tokenizer = str(folder.resolve()) if _files(folder) else None
    return _settings(config, generation, tokenizer)


def settings_of_model(model: Any) -> Settings:
    """Return the settings of a live ``transformers`` model."""
    generation = getattr(model, "generation_config", None)
    folder = Path(str(getattr(model.config, "_name_or_path", "") or "/nowhere"))
    tokenizer = str(folder.resolve()) if folder.is_dir() and _files(folder) else None
    generation_settings = None if generation is None else json.loads(generation.to_json_string())
    return _settings(model.config.to_dict(), generation_settings, tokenizer)


def settings_with_end(end: int) -> Settings:
    """Return the settings of a model that came from no folder, whose texts end with a token."""
    tokens = {"eos_token_id": end}
    return {"family": "", "tokens": tokens, "generation": {**tokens, "do_sample": False}, "tokenizer": None}


def settings_of(module: Any) -> Settings | None:
    """Return the settings that go with a module: its own, its model's, or those of what its layers were loaded from."""
    specs: Any = getattr(module, "layer_specs", ())
    inner = specs[0] if len(specs) == 1 else module
    if hasattr(getattr(inner, "config", None), "to_dict"):
        return settings_of_model(inner)
    sources = [module, *(getattr(spec, "cls", None) for spec in specs)]
    return next((kept for model in sources if (kept := getattr(model, "folder_settings", None)) is not None), None)


def write_settings(folder: Path, settings: Settings | None, tokenizer: Any = None) -> None:
    """Write the generation settings and the tokenizer's files to a folder.

    Args:
        folder: the folder.
        settings: what goes with the model, or None.
        tokenizer: a ``transformers`` tokenizer, a folder with a tokenizer's files, a ``tokenizer.json`` or an id of the
            Hub; None: those of the settings.

    Raises:
        FileNotFoundError: ``tokenizer`` is a folder without a tokenizer's files.
    """
    if settings is not None and settings["generation"] is not None:
        (folder / _GENERATION).write_text(json.dumps(settings["generation"], indent=2) + "\n", encoding="utf-8")
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
        return
    given = tokenizer if tokenizer is not None else None if settings is None else settings["tokenizer"]
    if given is None:
        return
    source = local_folder(given)
    files = [source] if source.is_file() else _files(source)
    if not files and tokenizer is not None:
        raise FileNotFoundError(f"{given} has no tokenizer's files, such as tokenizer.json. Give the folder with them.")
    if not files:
        warnings.warn(
            f"{folder} gets no tokenizer, because {given}, from which the model was loaded, has none any more. Give "
            "its folder: save_hf(..., tokenizer=folder), or triax checkpoint export --tokenizer FOLDER.",
            stacklevel=3,
        )
    for file in files:
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copyfile(file, folder / ("tokenizer.json" if file is source else file.name))


def _settings(config: Mapping[str, Any], generation: Any, tokenizer: str | None) -> Settings:
    tokens = {key: config[key] for key in _TOKENS if config.get(key) is not None}
    labels = {key: config[key] for key in _LABELS if config.get(key) is not None}
    own = {"family": config.get("model_type"), "tokens": tokens, "labels": labels}
    return {**own, "generation": generation, "tokenizer": tokenizer}


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _TOKENIZER if (folder / name).exists()]
