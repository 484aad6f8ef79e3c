"""Files of a checkpoint: readable with safetensors and json, complete or absent, and never unpickled."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import triax
from triax.base.errors import CheckpointError
from triax.base.json_values import decode, encode
from triax.checkpoint.convert.export import runs
from triax.checkpoint.format import folder as folders
from triax.checkpoint.format.index import read_index
from triax.checkpoint.reader import Reader
from triax.checkpoint.snapshot import pieces
from triax.engine.optim.schedulers import names
from triax.grid import Layout
from triax.grid.layout import FlatRange
from triax.grid.ranges import boxes_of_range, everything, overlap
from triax.models.gpt import gpt_layers
from triax.zero.state_shards import state_number as number_of

from support.checkpoint_jobs import SIZES, Cell, Job, command, make
from support.readme_blocks import block_of, steps_of_program
from support.small_checkpoints import linear
from support.training import small_config


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_an_interval_of_elements_is_cut_into_few_boxes(shape: list[int], data: st.DataObject) -> None:
    numel = int(np.prod(shape)) if shape else 1
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    found = [numbers[box].reshape(-1) for box in boxes_of_range(shape, start, stop)]
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert torch.cat([torch.arange(0), *found]).tolist() == [*range(start, stop)]


@settings(max_examples=60)
@given(st.data())
def test_the_pieces_of_all_ranks_make_up_the_tensor(data: st.DataObject) -> None:
    unit = data.draw(st.integers(1, 3))
    parts = tuple(unit * n for n in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    other, dim, size = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1)), data.draw(st.integers(1, 4))
    shape = (sum(parts), other) if dim == 0 else (other, sum(parts))
    layout = Layout(shape, "w", shard_dim=dim, parts=parts, unit=unit)
    whole, found = torch.randn(shape), torch.full(shape, torch.nan)
    for rank in range(size):
        local = layout.shard(whole, rank, size).reshape(-1)
        cut = data.draw(st.integers(0, local.numel()))
        for start, stop in ((0, cut), (cut, local.numel())):
            for box, value in pieces(FlatRange("w", layout, start, stop, local[start:stop]), rank, size):
                place = tuple(slice(a, b) for a, b in box)
                assert found[place].isnan().all()  # once each
                found[place] = value
                flat = [i for at, n in runs(shape, box) for i in range(at, at + n)]
                assert flat == torch.arange(whole.numel()).view(shape)[place].reshape(-1).tolist()
    assert torch.equal(found, whole)
    assert overlap(everything(shape), everything(shape)) == everything(shape)


def test_client_state_survives_encoding_and_decoding() -> None:
    """All is JSON but tensors, which are stored beside it under names."""
    tensor, array = torch.arange(6).view(2, 3), np.arange(3.0)
    plain = {
        "list": [1, 2.5, None, True, "text", float("inf"), (1, (2,)), {3, 4}, deque([1])],
        "dict": {1: "one", (2, 3): {"$float": "not a float"}, "x": Counter({5: 1})},
        "state of a generator": random.Random(1).getstate(),
        "dtype": torch.bfloat16,
    }
    stored: list[torch.Tensor] = []

    def store(tensor: torch.Tensor) -> str:
        stored.append(tensor.clone())
        return str(len(stored) - 1)

    text = json.dumps(encode({**plain, "tensor": tensor, "array": array}, store), allow_nan=False)
    found: Any = decode(json.loads(text), lambda name: stored[int(name)])
    assert type(found["tensor"]) is torch.Tensor and torch.equal(found.pop("tensor"), tensor)
    assert isinstance(found["array"], np.ndarray) and np.array_equal(found.pop("array"), array)
    assert found == plain


def test_client_state_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match=r"client_state\['model'\]\[0\] is a Linear, which JSON cannot hold"):
        encode({"model": [nn.Linear(1, 1)]}, lambda tensor: "0")
    with pytest.raises(TypeError, match="is a function"):
        encode({"f": encode})
    with pytest.raises(ValueError, match=r"the unknown kind \$code"):
        decode({"$code": "import os"})


def test_a_checkpoint_opens_with_safetensors_and_json_alone(saved: Path, tmp_path: Path) -> None:
    """The ten lines of docs/checkpoints.md, in a Python that does not know triax."""
    code = block_of("checkpoints.md", "# open.py")
    assert len(code.strip().splitlines()) <= 11  # with the name
    shutil.copytree(saved / "there", tmp_path / "runs/first/global_step8")
    end = "\ntorch.save(whole, 'whole.pt')\nimport sys\nassert 'triax' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code + end], cwd=tmp_path, check=True, timeout=60)
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    engine = make(Cell(), Job(), seed=8)
    engine.load_checkpoint(saved, "there")
    weights = engine.gather()
    assert {name.removeprefix("weights/") for name in found if name.startswith("weights/")} == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[f"weights/{name}"], tensor)


def test_files_hold_each_element_once_and_evenly(saved: Path) -> None:
    """Bytes under float64: 8 each for the value and AdamW's three moments; each element once, evenly over the ranks."""
    index = read_index(saved / "there")
    weights = [entry for name, entry in index.tensors.items() if name.startswith("weights/")]
    own = sum(entry.bytes for name, entry in index.tensors.items() if name.split("/")[0] in ("weights", "optimizer"))
    assert own == 4 * sum(entry.bytes for entry in weights)
    files = {path.name: path.stat().st_size for path in (saved / "there").glob("*.safetensors")}
    assert len(files) == 8 and files == {name: file.size for name, file in index.files.items()}
    rest = sum(entry.bytes for name, entry in index.tensors.items() if name.split("/")[0] == "random")
    headers = sum(file.header.stop for file in index.files.values())
    assert sum(files.values()) == own + rest + headers
    loads = [size - index.files[name].header.stop - rest / 8 for name, size in files.items()]
    assert max(loads) < 1.35 * sum(loads) / 8  # the first stage has the embedding, which the last one has too


def test_a_load_takes_the_tag_or_the_latest_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(Cell(), Job(optimizer="SGD"))
    assert engine.load_checkpoint(tmp_path) == (None, None) and "has no file 'latest'" in caplog.text
    engine.train_batch()
    for tag in (None, "second", "third"):
        assert engine.save_checkpoint(tmp_path, tag, {"tag": tag}, save_latest=tag != "third")
    assert (tmp_path / "latest").read_text() == "second"
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "second"), {"tag": "second"})
    assert engine.load_checkpoint(tmp_path, "global_step1")[1] == {"tag": None}
    with pytest.raises(CheckpointError, match=r"fourth is not a checkpoint.*are: global_step1, second, third"):
        engine.load_checkpoint(tmp_path, "fourth")
    with pytest.raises(CheckpointError, match=r"the tag '\.\./up' cannot be the name of"):
        engine.save_checkpoint(tmp_path, "../up")
    with pytest.raises(
        CheckpointError, match=r"client_state\['model'\] is a \w*PipelineEngine, which JSON cannot hold"
    ):
        engine.save_checkpoint(tmp_path, "bad", {"model": engine})
    assert engine.save_checkpoint(tmp_path, "second", {"tag": "again"})  # in its place
    assert engine.load_checkpoint(tmp_path)[1] == {"tag": "again"}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", ".saved.json", "global_step1", "latest", "second", "third"]


def test_resume_and_pruning_order_checkpoints_by_time_of_save(tmp_path: Path) -> None:
    """The newest checkpoint is the one written last, not the one of most steps; copies may change the files' times."""
    kept = {"dir": str(tmp_path), "every": 2, "keep": 3}
    first = make(Cell(), Job(optimizer="SGD"), checkpoint=kept)
    for _ in range(10):
        first.train_batch()
    back = make(Cell(), Job(optimizer="SGD"), checkpoint=kept)
    back.load_checkpoint(tmp_path, "global_step6")
    back.train_batch()
    assert back.save_checkpoint(tmp_path)  # by a name that the rule of pruning goes by
    for path in sorted(tmp_path.glob("*/index.json"), reverse=True):
        os.utime(path)
    assert folders.tags(tmp_path) == ["global_step6", "global_step8", "global_step10", "global_step7"]
    back.train_batch()
    assert folders.tags(tmp_path) == ["global_step10", "global_step7", "global_step8"]
    again = make(Cell(), Job(optimizer="SGD"), checkpoint={"dir": str(tmp_path), "resume": "auto"})
    assert again.global_steps == 8
    for name, weight in back.gather().items():
        assert torch.equal(weight, again.gather()[name])


def test_asynchronous_saves_use_the_folder_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = make(Cell(), Job(optimizer="SGD"), checkpoint={"async": True})
    engine.train_batch()
    assert engine.save_checkpoint("runs")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert engine.wait_for_checkpoint() is None
    assert folders.tags(tmp_path / "runs") == ["global_step1"] and not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_loaded_optimizer_keeps_its_kind_of_weight_decay(tmp_path: Path, decoupled: bool) -> None:
    """AdamW loads Adam's state and the reverse, as in torch; each keeps its own kind of weight decay."""
    params = {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": False}
    adam, adamw = {"type": "Adam", "params": params}, {"type": "AdamW", "params": {**params, "adam_w_mode": True}}
    assert linear(adam if decoupled else adamw).save_checkpoint(tmp_path)
    engine = linear(adamw if decoupled else adam)
    engine.load_checkpoint(tmp_path)
    assert [group["decoupled_weight_decay"] for group in engine.optimizer.param_groups] == [decoupled]


def test_step_counts_are_loaded_to_the_device_torch_expects() -> None:
    """Steps are on the parameter's device where torch's load_state_dict puts them there, else on the CPU."""
    there, step = torch.empty(2, device="meta"), torch.tensor(3.0)
    for key, group, device in (
        ("step", {"fused": True}, "meta"),
        ("step", {"capturable": True}, "meta"),
        ("step", {"fused": None, "capturable": False}, "cpu"),
        ("mu_product", {"fused": True}, "cpu"),
    ):
        assert number_of(key, step, there, group).device.type == device
    assert number_of("step", 3, there, {"fused": True}) == 3
    assert number_of("step", step, step, {}) is not step


@pytest.mark.parametrize("kind", sorted(k for k in names() if k != "SequentialLR"))
def test_every_learning_rate_schedule_resumes(kind: str, tmp_path: Path) -> None:
    params: dict[str, dict[str, Any]] = {
        "WarmupDecayLR": {"total_num_steps": 30, "warmup_num_steps": 3},
        "WarmupCosineLR": {"total_num_steps": 30, "warmup_num_steps": 3},
        "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 3},
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [2, 4]},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 9},
        "CosineAnnealingWarmRestarts": {"T_0": 2},
        "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1, "cycle_momentum": False},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 30},
        "ReduceLROnPlateau": {"patience": 0},
        "ChainedScheduler": {"schedulers": [{"type": "StepLR", "params": {"step_size": 2}}, {"type": "ConstantLR"}]},
    }
    config = small_config("Adam", lr=0.01, micro=2, scheduler={"type": kind, "params": params.get(kind, {})})

    def engine(seed: int) -> Any:
        torch.manual_seed(seed)
        return triax.initialize(model=nn.Linear(4, 4), config=config)[0]

    def steps(trained: Any, count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            loss = (trained(torch.ones(2, 4)) - 3).square().mean()
            trained.backward(loss)
            trained.step()
            seen.append((loss.item(), trained.get_lr(), trained.get_mom()))
        return seen

    one = engine(0)
    steps(one, 3)
    assert one.save_checkpoint(tmp_path)
    other = engine(1)
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == one.get_lr() and steps(other, 5) == steps(one, 5)


def test_safetensors_reads_the_same_tensors_as_the_reader(saved: Path) -> None:
    index = read_index(saved / "there")
    reader = Reader(saved / "there", index)
    for file in index.files:
        held = safetensors.torch.load_file(saved / "there" / file)
        for name, entry in index.tensors.items():
            for box in entry.boxes:
                if box.file == file:
                    place = tuple(slice(a, b) for a, b in box.box)
                    assert torch.equal(held.pop(box.key), reader.snapshot.tensors[name].read_all()[place])
        assert not held


def in_one_file(folder: str, cell: Cell) -> dict[str, torch.Tensor]:
    engine = make(cell, Job(half="bf16", tied=False))
    engine.train_batch()
    assert engine.save_checkpoint(folder, "bf16") and engine.save_16bit_model(folder, "pytorch_model.bin")
    weights = engine.gather()
    return weights if engine.grid.rank == 0 else {}


@pytest.mark.parametrize("cell", [Cell((2, 1, 2), stage=1), Cell((1, 2, 1), stage=3)])
def test_whole_weights_are_exported_to_one_file(ranks: Any, tmp_path: Path, cell: Cell) -> None:
    weights = ranks(cell.ranks, in_one_file, str(tmp_path), cell, timeout=60)[0]
    file = safetensors.torch.load_file(tmp_path / "pytorch_model.safetensors")
    assert file.keys() == weights.keys() and [path.name for path in tmp_path.glob(".*")] == [".saved.json"]
    for name, weight in weights.items():
        assert file[name].dtype == torch.bfloat16 and torch.equal(file[name], weight), name
    assert not command("export", tmp_path / "bf16", tmp_path / "whole.safetensors")[0]
    assert not command("export", tmp_path / "bf16", tmp_path / "half.safetensors", "--dtype", "bfloat16")[0]
    masters = safetensors.torch.load_file(tmp_path / "whole.safetensors")
    half = safetensors.torch.load_file(tmp_path / "half.safetensors")
    for name, weight in weights.items():
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name].bfloat16(), weight)
        assert torch.equal(half[name], weight)
    assert any((masters[name] != weight.float()).any() for name, weight in weights.items())


def test_checkpoint_commands_show_and_compare_checkpoints(saved: Path, tmp_path: Path) -> None:
    engine = make(Cell(), Job(optimizer="SGD"))
    for _ in range(3):
        engine.train_batch()
        assert engine.save_checkpoint(tmp_path)
    code, text = command("show", saved)
    size = sum(file.stat().st_size for file in (saved / "there").glob("*.safetensors"))
    assert code == 0 and f"8 files of {size / 1e6:.3f} MB" in text.partition("weights/layers.0.weight")[0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(saved)  # the folder of a run
    assert command("show", tmp_path / "run")[1].splitlines()[1:] == text.splitlines()[1:]
    assert "step 2, saved on 2 pipe x 2 data x 2 tensor" in text and "weights/layers.0.weight" in text
    assert f"{sum(p.numel() for p in engine.module.parameters()):,} parameters" in text
    code, text = command("verify", saved)
    assert code == 0 and f"8 files, {size / 1e6:.3f} MB, all as they were written" in text
    code, text = command("diff", tmp_path / "global_step1", tmp_path / "global_step3")
    lines = text.splitlines()
    assert code == 1 and "step: 1 | 3" in lines and any("layers.0.weight: " in line for line in lines)
    assert command("diff", tmp_path, tmp_path / "global_step3")[0] == 0
    other = make(Cell(), Job(optimizer="SGD"))
    other.load_checkpoint(tmp_path)
    assert other.save_checkpoint(tmp_path / "other", client_state={"best": 1})
    assert command("diff", tmp_path, tmp_path / "other") == (1, "client_state/best: None | 1\n")
    assert "optimizer/exp_avg/layers.0.weight: only in" in command("diff", tmp_path, saved)[1]
    (tmp_path / "latest").write_text("global_step1")  # it stays in any case
    assert "global_step2 would go" in command("prune", tmp_path, "--keep", 1, "--dry-run")[1]
    assert command("prune", tmp_path, "--keep", 1)[0] == 0
    assert folders.tags(tmp_path) == ["global_step1", "global_step3"]
    with (tmp_path / "global_step1/rank-00000.safetensors").open("r+b") as file:
        file.seek(20)
        file.write(b"\x00")
    code, text = command("verify", tmp_path)
    assert code == 1 and "rank-00000.safetensors is damaged: its header" in text
    assert "is damaged" in command("export", tmp_path, tmp_path / "m.safetensors")[1]
    assert "Give m.safetensors" in command("export", saved, "m.bin")[1]
    assert f"there is no folder {tmp_path / 'nothing'}" in command("show", tmp_path / "nothing")[1]
    assert "has no index.json" in command("show", Path(__file__).parent)[1]


def test_the_program_of_the_checkpoints_page_resumes(ranks: Any, tmp_path: Path) -> None:
    source = block_of("checkpoints.md", "# save.py")
    assert ranks(2, steps_of_program, source, str(tmp_path), "engine") == [4] * 2
    assert ranks(1, steps_of_program, source, str(tmp_path), "engine") == [4 + 4]
    shown = [line.strip("│├└─ ").split()[0] for line in block_of("checkpoints.md", "runs/first\n").splitlines()]
    assert Counter(shown[1:]) == Counter(path.name for path in (tmp_path / "runs/first").rglob("*"))


def weights_of_iterator_program(source: str, folder: str, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Run the lines of the docs on this rank; return the weights."""
    os.chdir(folder)
    grid = triax.Grid(**axes, timeout=60)  # type: ignore[arg-type]
    layers = [triax.LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    loss_fn = nn.functional.mse_loss
    model = triax.PipelineModule(layers, grid=grid, loss_fn=loss_fn, seed=0, dtype=torch.float64, partition="uniform")
    optimizer, batch = partial(torch.optim.Adam, lr=0.01), triax.Batch(size=8, microbatch=2)
    engine = triax.Engine(model, optimizer=optimizer, batch=batch)

    def microbatches(replica: int, replicas: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in itertools.count():
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            for first in range(replica * 8 // replicas, (replica + 1) * 8 // replicas, 2):
                yield x[first : first + 2], x[first : first + 2].flip(1)

    exec(source, {"engine": engine, "grid": grid, "microbatches": microbatches})
    return engine.gather()


def test_an_iterator_continues_at_the_right_batch(ranks: Any, tmp_path: Path) -> None:
    """Two steps on two stages and four on two replicas are six steps on one process."""
    source = block_of("checkpoints.md", "# iterator.py")
    assert "global_steps < 6" in source
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    (wanted,) = ranks(1, weights_of_iterator_program, source, str(tmp_path / "whole"), {})
    first = source.replace("global_steps < 6", "global_steps < 2")
    ranks(2, weights_of_iterator_program, first, str(tmp_path / "parts"), {"pipe": 2})
    for found in ranks(2, weights_of_iterator_program, source, str(tmp_path / "parts"), {"data": 2}):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def load_without_engine(saved: str) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    grid = triax.Grid(pipe=2, timeout=60)
    model = triax.PipelineModule(gpt_layers(SIZES), grid=grid, seed=9, device="meta")
    generator = triax.init_inference(model, checkpoint=saved, dtype=torch.float32)
    weights = {p.layout.name: p.parameter.detach().clone() for p in model.local_parameters()}
    return weights, generator.generate([[1, 2, 3]], 4, temperature=0)


def test_weights_load_into_a_model_without_an_engine(ranks: Any, saved: Path, tmp_path: Path) -> None:
    """Weights and generated tokens on two stages that are built from the meta device, in another dtype."""
    engine = make(Cell(), Job(), seed=8)
    engine.load_checkpoint(saved)
    wanted = engine.gather()
    first, second = ranks(2, load_without_engine, str(saved), timeout=60)
    assert {**first[0], **second[0]}.keys() == wanted.keys()
    for weights, _ in (first, second):
        assert all(torch.equal(weight, wanted[name].float()) for name, weight in weights.items())
    assert first[1] == second[1] == triax.init_inference(engine).generate([[1, 2, 3]], 4, temperature=0)
    model = triax.PipelineModule(gpt_layers(SIZES), seed=9)
    triax.load_weights(model, saved)
    triax.save_hf(model, tmp_path)  # to Hugging Face
    theirs = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(theirs["transformer.wte.weight"], wanted["layers.0.weight"].float())
    assert torch.equal(theirs["transformer.h.0.attn.c_attn.weight"].T, wanted["layers.2.attention.qkv.weight"].float())
    plain = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"does not have weights/weight \(2, 2\), weights/bias \(2,\)"):
        triax.load_weights(plain, saved)
    with pytest.raises(ValueError, match=r"^weight is on the meta device.*to_empty"):
        triax.load_weights(plain.to("meta"), saved)


def test_a_torch_dcp_checkpoint_is_imported(tmp_path: Path) -> None:
    """Weights, moments, steps: the next steps are those that torch's own optimizer takes."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    code, text = command("import", tmp_path / "dcp", tmp_path / "runs")
    assert code and "is a pickle" in text and "pass --unpickle" in text and not (tmp_path / "runs").exists()
    assert "begins with 'net.'" in command("import", tmp_path / "dcp", tmp_path, "--unpickle", "--weights", "net.")[1]
    buffers = [word for name in ("running_mean", "running_var", "num_batches") for word in ("--buffers", f"*.{name}*")]
    code, text = command("import", tmp_path / "dcp", tmp_path / "runs", "--unpickle", *buffers)
    assert code == 0 and "optimizer.param_groups" in text
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    engine = triax.initialize(model=other, config=config)[0]
    engine.load_checkpoint(tmp_path / "runs")
    for _ in range(3):
        step()
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine.global_steps == 4
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(engine.module_state_dict()[name], tensor, rtol=0, atol=1e-12, msg=name)
