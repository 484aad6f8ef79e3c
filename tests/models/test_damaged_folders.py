"""Damaged and hostile folders of models: one line with the file and exit code 2, no traceback, no wait."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import triax
from triax.base.errors import ConfigError
from triax.cli.main import main
from triax.data.tokenizer import load_transformers, open_tokenizer, within_limit
from triax.models.huggingface.load import config_from_hf, load_hf

EMBEDDING = "model.embed_tokens.weight"
BAD: tuple[Any, ...] = (None, "x", -1, 0, 10**9, 1e30, True, [], {}, [[1]], {"a": {}})
VOCABULARY = 256  # bytes, which need no tokenizer
NESTED = b"[" * 200_000
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "eos_token_id": 1,
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[a-z]"}, "behavior": "Isolated", "invert": False},
    "model": {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate("?_abcdefghij")},
        "unk_token": "?",
    },
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Path:
    """A folder of a small Llama over bytes, in two files."""
    folder: Path = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys((EMBEDDING, "lm_head.weight"), (VOCABULARY, 8))
    block = {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8)}
    block |= {"self_attn.o_proj": (8, 8), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12)}
    sizes |= {f"model.layers.0.{name}.weight": size for name, size in block.items()}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    sizes |= {f"{name}.weight": (8,) for name in norms}
    files = dict.fromkeys(sizes, "b.safetensors") | {"lm_head.weight": "a.safetensors"}
    for file in set(files.values()):
        save_file({name: torch.ones(size) for name, size in sizes.items() if files[name] == file}, folder / file)
    for name, content in (
        ("config.json", CONFIG),
        ("generation_config.json", {"eos_token_id": [1]}),
        ("model.safetensors.index.json", {"metadata": {}, "weight_map": files}),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nest of dicts."""
    if path:
        yield path
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from places(each, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(content)
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    if value is Ellipsis:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return found


def command(*words: str) -> int:
    """Run the command ``triax`` in this process; return its exit code."""
    before, sys.argv = sys.argv, ["triax", *words]
    try:
        main()
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        sys.argv = before
    return 0


def complaint(call: Any, *args: Any) -> str | None:
    """The message of the ConfigError that a call raises, or None."""
    try:
        call(*args)
    except ConfigError as error:
        return str(error)
    return None


def damaged(name: str, right: bytes, nth: int, depth: int = 9) -> list[bytes]:
    """Contents of a file that a crash, a copy or an enemy could leave; of these every nth."""
    draw = random.Random(name)
    cases: list[bytes] = [b"", right[: len(right) // 2], b"\0" * 64, b"\xff\xfe", b"null", b"3", b"[1]", NESTED]
    if name.endswith(".json"):
        content = json.loads(right)
        for path in places(content):
            if len(path) <= depth:
                cases += [json.dumps(changed(content, path, value)).encode() for value in draw.sample((..., *BAD), 5)]
    else:
        header = json.loads(right[8 : 8 + struct.unpack("<Q", right[:8])[0]])
        tensor = next(iter(header))
        for path in ((tensor, "dtype"), (tensor, "shape"), (tensor, "data_offsets"), (tensor,)):
            for value in (..., None, [10**18, 10**18], "I64"):
                text = json.dumps(changed(header, path, value)).encode()
                cases.append(struct.pack("<Q", len(text)) + text + right[8 + struct.unpack("<Q", right[:8])[0] :])
        cases += [struct.pack("<Q", 2**63) + right[8:], right[:-8]]
    return cases[draw.randrange(nth) :: nth]


EACH = pytest.mark.parametrize("nth", [6, pytest.param(1, marks=pytest.mark.exhaustive)])


@EACH
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_model_file_gives_an_error_of_one_line(whole: Path, tmp_path: Path, capsys: Any, nth: int) -> None:
    """Damage that changes nothing, such as in an index's metadata, gives the text of the whole folder instead."""
    folder = tmp_path / "small"
    shutil.copytree(whole, folder)
    words = ("generate", str(folder), "--prompt", "abc", "--max-new-tokens", "1")
    assert command(*words) == 0
    text, refused, cases = capsys.readouterr().out, 0, 0
    assert text.startswith("abc") and len(text) == len("abc~\n")
    for name in sorted(path.name for path in whole.iterdir()):
        right = (whole / name).read_bytes()
        for case in damaged(name, right, nth):
            (folder / name).write_bytes(case)
            capsys.readouterr()
            code = command(*words)
            out, said = capsys.readouterr()
            if code:
                fits = code == 2 and said.count("\n") == 1 and str(folder) in said and len(said) < 900
                assert fits and not out, (name, case[:300], code, said)
            else:
                assert out == text, (name, case[:300], out)
            refused, cases = refused + bool(code), cases + 1
        (folder / name).write_bytes(right)
    assert refused > 0.8 * cases


@EACH
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_tokenizer_file_gives_an_error_of_one_line(tmp_path: Path, nth: int) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "_"}
    files = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": settings}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert complaint(open_tokenizer, tmp_path) is None and complaint(load_transformers, tmp_path) is None
    for name, content in files.items():
        right = json.dumps(content).encode()
        for case in damaged(name, right, nth, depth=3):
            (tmp_path / name).write_bytes(case)
            for function in (open_tokenizer, load_transformers):  # of `triax data tokenize`, and of `triax generate`
                said = complaint(function, tmp_path)
                fits = said is None or (str(tmp_path) in said and "\n" not in said and len(said) < 900)
                assert fits, (function, case[:300], said)
        (tmp_path / name).write_bytes(right)


def test_impossible_sizes_in_a_config_are_refused(whole: Path, tmp_path: Path) -> None:
    """A number of blocks from which names alone would fill the memory, before any weight is looked up."""
    folder = tmp_path / "small"
    shutil.copytree(whole, folder)
    fewer = r"500 blocks, but .* has 12 tensors"  # config_from_hf looks at no weights, which an id would download
    for number, said, function in (
        (10**9, "at most", load_hf),
        (10**9, "at most", config_from_hf),
        (500, fewer, load_hf),
    ):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": number}))
        with pytest.raises(ConfigError, match=f"{folder}/config.json.*{said}"):
            function(folder)
    for key, value in (("hidden_size", 10**19), ("intermediate_size", -(10**30)), ("rms_norm_eps", -1)):
        (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        with pytest.raises(ConfigError, match=f"{folder}/config.json: {key} is .* but must be from"):
            config_from_hf(folder)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "sub/../../outside.safetensors", "..", "", 300 * "a"]
)
def test_an_index_cannot_name_files_outside_of_its_folder(whole: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "small"
    shutil.copytree(whole, folder)
    shutil.copy(whole / "a.safetensors", tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=f"{index} lists .*only files of its own folder"):
        load_hf(folder)


def test_the_layout_of_hugging_faces_cache_is_read(whole: Path, tmp_path: Path) -> None:
    """There, each file is a link to a blob outside of the folder."""
    folder, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    folder.mkdir(parents=True)
    shutil.copytree(whole, blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / str(number))
        (folder / file.name).symlink_to(Path("../../blobs") / str(number))
    model = triax.PipelineModule(load_hf(folder), grid=triax.Grid())
    assert torch.equal(model.state_dict()["layers.0.weight"], load_file(folder / "b.safetensors")[EMBEDDING])


@pytest.mark.parametrize("pattern", ["(a+)+$", "(?:[a-z]+)*!", "((a|b)+c?){2,}d", "(.*.*)*x"])
def test_a_tokenizer_pattern_of_exponential_time_is_refused(tmp_path: Path, pattern: str) -> None:
    content = changed(TOKENIZER, ("pre_tokenizer", "pattern", "Regex"), pattern)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for function, place in ((open_tokenizer, ""), (open_tokenizer, "tokenizer.json"), (load_transformers, "")):
        with pytest.raises(ConfigError, match=r"tokenizer.json has the pattern .* repeats a group that itself repeats"):
            function(tmp_path / place)


def test_within_limit_ends_calls_that_take_too_long() -> None:
    with pytest.raises(ConfigError, match=r"small/tokenizer.json needs more than 0.05 s for a line of text"):
        within_limit(Path("small/tokenizer.json"), Event().wait, 0.05)
    with pytest.raises(ConfigError, match=r"small fails on a text: .*division"):
        within_limit(Path("small"), lambda: 1 // 0)


@pytest.mark.parametrize(
    "pattern",  # of GPT-2, Llama 3, GPT-4o, DeepSeek-V3, Bloom, and with counted groups
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|\s+",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
        r"(?:\r?\n)+|(?=(\d{3})+(?!\d))|[0-9][0-9]",
    ],
)
def test_patterns_of_known_tokenizers_are_taken(whole: Path, tmp_path: Path, pattern: str) -> None:
    content = changed(TOKENIZER, ("pre_tokenizer", "pattern", "Regex"), pattern)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert open_tokenizer(tmp_path / "tokenizer.json").facts.vocab_size == 12
