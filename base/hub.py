"""Repositories of the Hugging Face Hub: ``Qwen/Qwen3-0.6B`` wherever a folder goes, ``hf://datasets/...`` for data.

    ORG/NAME[@REVISION]                                  a model or a tokenizer; the revision is a branch, tag or commit
    hf://datasets/ORG/NAME[@REVISION][/FILE-OR-FOLDER]   data

huggingface_hub downloads into its own cache and reads its own variables (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN). It locks
each file: one process of a host downloads it, and the others wait.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError, close, to_install

DATA_URI = "hf://datasets/"
_NAME = r"[A-Za-z0-9][\w.-]*/\w[\w.-]*"
_MODEL = re.compile(rf"(?P<id>{_NAME})(?:@(?P<revision>[\w./-]+))?")
_DATA = re.compile(rf"{DATA_URI}(?P<id>{_NAME})(?:@(?P<revision>refs/\w+/[\w.-]+|[\w.-]+))?(?:/(?P<path>.+))?")
_FILES = (".json", ".yaml", ".yml", ".toml", ".safetensors", ".py")  # endings of files, which are no repositories
# Of a folder of transformers: never pickles or code, nor the same weights again in other formats.
_SETTINGS = ["*.json", "*.txt", "*.model", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_IGNORED = ["*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors", "consolidated*.safetensors"]


def local_folder(name: str | Path, *, weights: bool = False) -> Path:
    """Return the path that a name is: of a file or folder here, or of the Hub's repository of that id in the cache.

    What exists here goes before the Hub, and a ``Path`` is never an id. A name that is no id either is returned as it
    is, so that the caller says what is missing.

    Args:
        name: a path, or ``ORG/NAME`` or ``ORG/NAME@REVISION``.
        weights: download ``*.safetensors`` too, beside the configuration and the tokenizer's files.

    Raises:
        ConfigError: huggingface_hub is not installed; there is no such repository or revision; it has no safetensors;
            or it is not in the cache and the Hub cannot be reached.
    """
    found = _repository(name)
    if found is None:
        return Path(name)
    folder = _snapshot(found["id"], found["revision"], None, [*_SETTINGS, *_WEIGHTS] if weights else _SETTINGS)
    if weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{name} has no *.safetensors in {folder}. If it was downloaded without them, type "
            f"{_command(found['id'], found['revision'])}. If it has none on the Hub, only pickles, let transformers "
            "convert it on a machine that may run code from there: save_pretrained writes safetensors."
        )
    return folder


def pinned(name: str) -> str:
    """Return a name with the commit that the Hub has now, ``ORG/NAME@COMMIT``; other names as they are.

    Raises:
        ConfigError: as for ``local_folder``.
    """
    found = _repository(name)
    return name if found is None else f"{found['id']}@{local_folder(name).name}"


def is_here(name: str) -> bool:
    """Return True for an existing path, and for a Hub's repository whose configuration or tokenizer is in the cache."""
    found = _repository(name)
    if found is None:
        return Path(name).exists()
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # without it there is no cache
        return False
    files = ("config.json", "tokenizer.json", "tokenizer_config.json")
    return any(isinstance(try_to_load_from_cache(found["id"], file, revision=found["revision"]), str) for file in files)


def data_path(name: str | Path, endings: Sequence[str]) -> Path:
    """Return the path of a source of data: ``name`` itself, or of a data set of the Hub in the cache.

    Args:
        name: a path, or ``hf://datasets/ORG/NAME[@REVISION][/FILE-OR-FOLDER]``.
        endings: of the files to download from a folder, such as ``.parquet``.

    Raises:
        ConfigError: as for ``local_folder``.
    """
    if not str(name).startswith(DATA_URI):
        return Path(name)
    found = _DATA.fullmatch(str(name))
    if found is None:
        raise ConfigError(f"{name} is no data set of the Hub. Give hf://datasets/ORG/NAME[@REVISION][/FILE-OR-FOLDER].")
    path = (found["path"] or "").strip("/")
    within = [f"{path}/*{end}".lstrip("/") for end in endings]
    folder = _snapshot(found["id"], found["revision"], "dataset", [path, *within] if path else within)
    if not (folder / path).exists():
        raise ConfigError(f"{found['id']} has no {path} with files that end in {', '.join(endings)}, at {folder.name}.")
    return folder / path


def _repository(name: str | Path) -> re.Match[str] | None:
    """Return the parts of a model's id; None for a path."""
    if not isinstance(name, str) or name.endswith(_FILES) or Path(name).exists():
        return None
    return _MODEL.fullmatch(name)


def _snapshot(name: str, revision: str | None, kind: str | None, files: list[str]) -> Path:
    """Return the folder of a repository's files in the cache, downloaded if the Hub can be reached."""
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"there is no folder {name}, and huggingface_hub, which downloads it from the Hub, is not installed. Type "
            f"{to_install('hf')}"
        ) from error
    what = "data set" if kind else "model"
    here = f"there is no folder {name} here{_near(name)}, and" if kind is None else "there is"
    page = f"{constants.ENDPOINT}/{'datasets/' if kind else ''}{name}"
    ignored = None if kind else _IGNORED
    arguments: dict[str, Any] = {"repo_type": kind, "allow_patterns": files, "ignore_patterns": ignored}
    try:
        return Path(snapshot_download(name, revision=revision, **arguments))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is given only to users who accepted its terms. Accept them at {page}, and type hf auth login, or "
            "set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{here} no {what} {name} on the Hub that this user may read. Correct the name; for a private one type hf "
            "auth login, or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{name} has no branch, tag or commit {revision}. Its revisions are listed at {page}/tree/main."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        reason = re.sub(r"\[Errno -?\d+\] ", "", " ".join(str(cause).split()))
        why = f"the Hub cannot be reached: {reason[:100] or type(cause).__name__}"
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else why
        command = _command(name, revision, files if kind else ())
        raise ConfigError(
            f"{here} no complete {what} {name}{f'@{revision}' if revision else ''} in the cache "
            f"{constants.HF_HUB_CACHE} ({why}). Where there is a network, type {command}, with the same HF_HOME."
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{name} could not be downloaded: {' '.join(str(error).split())[:300]}") from error


def _command(name: str, revision: str | None, files: Sequence[str] = ()) -> str:
    """Return the command that downloads a model, or some files of a data set."""
    given = ["--repo-type dataset"] * bool(files) + [f"--revision {revision}"] * bool(revision)
    return " ".join(["hf download", name, *given, *(f"--include '{file}'" for file in files)])


def _near(name: str) -> str:
    """Return a hint at the folder whose name is nearest to the last word of a missing path; '' if none is near."""
    parent, last = Path(name).parent, Path(name).name
    near = close(last, [each.name for each in parent.iterdir() if each.is_dir()]) if parent.is_dir() else None
    return "" if near is None else f" (did you mean {parent / near}?)"
