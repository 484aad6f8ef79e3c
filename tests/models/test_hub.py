"""Ids of the Hugging Face Hub wherever a folder goes: a cache made here against the folder, a server, and errors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triax
from triax.base.errors import ConfigError
from triax.base.hub import data_path, is_here, local_folder, pinned
from triax.cli.check_targets import read_target
from triax.cli.model_folder import find_model
from triax.cli.plan_inputs import model_of
from triax.data import open_tokenizer
from triax.data.sources import Reading, find_sources
from triax.data.tokenizer import train_tokenizer
from triax.grid import Grid
from triax.inference.load_any import load_any
from triax.models.huggingface.load import config_from_hf, load_hf
from triax.models.huggingface.save import save_hf
from triax.tensor_parallel import gather_logits
from triax.train.file import read_training_file
from triax.train.start import make_job

from support.hub_cache import HubServer, cache_of, fill
from support.huggingface_models import assert_bitwise, saved
from support.tokenized import texts, write_json_lines

ID, DATA = "tiny/llama-0.1", "tiny/stories"


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Tensor]:
    """A folder with a model and its tokenizer, and some ids."""
    folder, ids, _ = saved(tmp_path, "llama", vocab_size=300)
    source = write_json_lines(tmp_path / "text.jsonl", texts(40))
    train_tokenizer(find_sources([source])[0], Reading(), 300, folder)
    return folder, ids


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache; the network is off."""
    with cache_of(tmp_path / "hub"):
        yield tmp_path / "hub"


def logits_of_id(sizes: tuple[int, int, int], cache: str, folder: str, ids: Tensor, out: str) -> list[Tensor]:
    """Logits of the layers of a folder, those of an id, and of modules into which it is loaded; weights are written."""
    with cache_of(Path(cache)):
        grid = Grid(*sizes)
        wanted = triax.PipelineModule(load_hf(folder), grid=grid)
        built = triax.PipelineModule(load_hf(ID), grid=grid)
        filled = load_hf(f"{ID}@main", triax.PipelineModule(load_hf(ID), grid=grid, seed=1))
        loaded = triax.PipelineModule(load_hf(ID), grid=grid)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
        load_any(loaded, ID, grid)
        save_hf(built, out)
    with torch.no_grad():
        return [gather_logits(each(ids), grid=grid, vocab_size=300) for each in (wanted, built, filled, loaded)]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2)])
def test_a_hub_id_loads_the_weights_of_its_folder(
    ranks: Any, tmp_path: Path, llama: Any, sizes: tuple[int, int, int]
) -> None:
    folder, ids = llama
    fill(tmp_path / "hub", ID, folder)
    out = tmp_path / "out"
    for wanted, *found in ranks(sizes[2], logits_of_id, sizes, str(tmp_path / "hub"), str(folder), ids, str(out)):
        assert len(found) == 3 and all(torch.equal(each, wanted) for each in found)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert_bitwise(load_file(out / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_a_local_folder_wins_over_a_hub_id_of_its_name(
    tmp_path: Path, llama: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fill(cache, ID, llama[0])
    monkeypatch.chdir(tmp_path)
    for name in (ID, f"{ID}@main", f"{ID}@{snapshot.name}", pinned(ID), pinned(f"{ID}@main")):
        assert local_folder(name) == local_folder(name, weights=True) == snapshot
        assert is_here(name)
    assert pinned(ID) == f"{ID}@{snapshot.name}"
    shutil.copytree(llama[0], tmp_path / ID)
    assert local_folder(ID) == Path(ID) and pinned(ID) == ID
    for path in (Path("other/model"), "a/b/c", "./other", "/other/model", "other/file.json", "other", "bytes"):
        assert local_folder(path) == Path(path) and not is_here(str(path))


def test_a_hub_revision_opens_its_own_snapshot(llama: Any, cache: Path) -> None:
    main = fill(cache, ID, llama[0])
    (llama[0] / "chat_template.jinja").write_text("{{ messages }}")
    other = fill(cache, ID, llama[0], revision="refs/pr/1")
    assert local_folder(f"{ID}@refs/pr/1") == other != main == local_folder(ID)


def test_commands_and_training_files_take_a_hub_id(tmp_path: Path, llama: Any, cache: Path) -> None:
    folder, _ = llama
    snapshot = fill(cache, ID, folder)
    assert config_from_hf(ID) == config_from_hf(folder) == model_of(ID)[0]
    assert find_model(ID) == snapshot
    build, batches = read_target(ID, ["num_hidden_layers=1"], None)
    assert len(batches()) == 1 and build(Grid()).layer_specs
    source = write_json_lines(tmp_path / "text.jsonl", texts(40))
    made = triax.data.tokenize([source], ID, tmp_path / "tokens")
    assert made.folder.index.tokenizer.name == ID
    (tmp_path / "run.yaml").write_text(
        f"model: {{folder: {ID}}}\ndata: {tmp_path / 'tokens'}\nbatch: 2\ntraining: {{steps: 1, sequence: 8}}\n"
        f"sample: {{prompt: '1:', tokens: 4}}\nruns: {tmp_path / 'runs'}\n"
    )
    job = make_job(read_training_file(tmp_path / "run.yaml")[0])
    assert job.file.model.folder == job.tokenizer == f"{ID}@{snapshot.name}"
    assert job.model == config_from_hf(folder)


def test_a_tokenizer_opens_by_its_hub_id(tmp_path: Path, llama: Any, cache: Path) -> None:
    fill(cache, ID, llama[0])
    ours, theirs = open_tokenizer(ID), open_tokenizer(llama[0])
    assert ours.facts.fingerprint == theirs.facts.fingerprint and ours.facts.name == ID
    assert ours.encode(["1:abc"])[0].tolist() == theirs.encode(["1:abc"])[0].tolist()


def test_hub_dataset_uris_open_files_of_the_snapshot(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "data"
    for name in ("en/one", "en/two", "de/one"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_json_lines(root / f"{name}.jsonl", texts(3))  # all equal: the cache has one blob
    (root / "README.md").write_text("about")
    snapshot = fill(cache, DATA, root, kind="dataset")
    for given, wanted in {
        f"hf://datasets/{DATA}": ["de/one.jsonl", "en/one.jsonl", "en/two.jsonl"],
        f"hf://datasets/{DATA}@main/en": ["en/one.jsonl", "en/two.jsonl"],
        f"hf://datasets/{DATA}@{snapshot.name}/en/two.jsonl": ["en/two.jsonl"],
    }.items():
        found, left = find_sources([given])
        assert [str(Path(each.name).relative_to(snapshot)) for each in found] == wanted and not left
    with pytest.raises(ConfigError, match=r"no fr with files that end in \.parquet"):
        data_path(f"hf://datasets/{DATA}/fr", [".parquet"])
    with pytest.raises(ConfigError, match="Give hf://datasets/ORG/NAME"):
        find_sources(["hf://datasets/stories"])


def test_ids_missing_from_the_cache_name_the_download_command(
    tmp_path: Path, llama: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    said = r"no folder runs/mien here \(did you mean runs/mine\?\), and no complete model runs/mien in the cache"
    with pytest.raises(ConfigError, match=rf"{said} .*HF_HUB_OFFLINE is set.* type hf download runs/mien,"):
        load_hf("runs/mien")
    with pytest.raises(ConfigError, match=r"hf download tiny/none --revision v2,"):
        open_tokenizer("tiny/none@v2")
    with pytest.raises(ConfigError, match=r"hf download tiny/none --repo-type dataset --include 'en' --include"):
        find_sources(["hf://datasets/tiny/none/en"])
    (llama[0] / "model.safetensors").unlink()
    fill(cache, ID, llama[0])  # as transformers leaves it that read the tokenizer alone
    assert config_from_hf(ID)
    with pytest.raises(ConfigError, match=rf"has no \*.safetensors .* type hf download {ID}\."):
        load_hf(ID)
    for target, words in (
        ("configs/run.yaml", "nor a Hugging Face folder"),
        ("tiny/none", "type hf download tiny/none,"),
    ):
        with pytest.raises(ValueError, match=words):
            read_target(target, [], None)


def test_an_unreachable_hub_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(ID, tmp_path) as server:
        address = server.address  # where nothing listens any more
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    with cache_of(tmp_path / "hub", offline=False), pytest.raises(ConfigError, match="the Hub cannot be reached: "):
        local_folder(ID)


PROGRAM = """
import sys
from triax.base.hub import data_path, local_folder
try:
    for name in sys.argv[1:]:
        print(data_path(name, [".jsonl"]) if name.startswith("hf:") else local_folder(name, weights=True))
except ValueError as error:
    print(error)
"""


def test_only_one_process_of_a_host_downloads_a_model(tmp_path: Path, llama: Any) -> None:
    folder = tmp_path / "files"
    shutil.copytree(llama[0], folder)
    unwanted = ["pytorch_model.bin", "modeling.py", "consolidated.safetensors", "onnx/model.onnx", "old/config.json"]
    for name in unwanted:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"0")
    wanted = {file.name for file in llama[0].iterdir()}
    with HubServer(ID, folder) as server:
        environment = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.address, "PATH": "", "NO_PROXY": "*"}

        def start(*names: str, **more: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", PROGRAM, *names]
            return subprocess.Popen(command, env=environment | more, stdout=subprocess.PIPE, text=True, cwd=tmp_path)

        together = [start(ID) for _ in range(3)]
        (printed,) = {process.communicate(timeout=60)[0] for process in together}
        snapshot = Path(printed.strip())
        assert snapshot.name == server.commit
        assert {file.name for file in snapshot.iterdir()} == wanted
        assert all((snapshot / name).read_bytes() == (llama[0] / name).read_bytes() for name in wanted)
        assert server.sent == dict.fromkeys(wanted, 1)
        assert start(ID, HF_HUB_OFFLINE="1").communicate(timeout=60)[0] == printed
        for name, said in {
            f"{ID}@v9": f"{ID} has no branch, tag or commit v9",
            "given/few": "Accept them at",
            "tiny/nothing": "no model tiny/nothing on the Hub that this user may read",
            "hf://datasets/tiny/nothing": "no data set tiny/nothing on the Hub",
        }.items():
            assert said in start(name).communicate(timeout=60)[0], name
