"""Checkpoints that older versions of triax wrote are loaded bit for bit: ``fixtures/``, with the values they must give.

``fixtures/NAME`` is a folder that ``save_checkpoint`` of triax 0.1.0 left. ``fixtures/expected.json`` has for each: the
run's configuration; the SHA-256 of each tensor (16 digits); what an engine has after loading, by grid and rank; the
losses and gradient norms of the next two steps; and for a GPT and a Llama the exported ``config.json``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import triax
from triax.checkpoint.format.folder import verify
from triax.checkpoint.format.index import read_index
from triax.checkpoint.reader import Reader

from support.command_line import output_of

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())
CASES = [(name, sizes) for name, case in EXPECTED.items() for sizes in case["resumed"]]


def checkpoint(name: str) -> Path:
    """The checkpoint's own folder."""
    return FIXTURES / name / (FIXTURES / name / "latest").read_text()


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    value = tensor.detach().cpu().contiguous()
    head = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}\n".encode()
    return hashlib.sha256(head + value.numpy().tobytes()).hexdigest()


def digest_of_all(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of tensors with their names."""
    lines = "".join(f"{name} {digest(tensor)}\n" for name, tensor in sorted(tensors.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def readable(value: Any) -> str:
    """A value of a client state, as expected.json has it."""
    return f"{value.tolist()!r} {value.dtype}" if isinstance(value, Tensor) else repr(value)


# ------------------------------------------------------------------------------------------------- the runs


def language_model(name: str, grid: triax.Grid) -> Any:
    sizes = EXPECTED[name]["model"]
    shared = {
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["sequence_length"],
        "hidden_size": sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
    }
    if name == "gpt":
        layers = triax.gpt_layers(triax.GPTConfig(**shared, dropout=sizes["dropout"]))
    else:
        layers = triax.llama_layers(
            triax.LlamaConfig(
                **shared,
                num_key_value_heads=sizes["kv_heads"],
                intermediate_size=sizes["hidden"],
                tie_word_embeddings=sizes["tie_embeddings"],
            )
        )
    config = EXPECTED[name]["config"]
    loss = triax.NextTokenLoss(grid, sizes["vocab_size"])
    dtype = torch.float64 if name == "gpt" else torch.float32
    module = triax.PipelineModule(layers, grid=grid, loss_fn=loss, seed=config["seed"], dtype=dtype)
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1]},
        {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return triax.initialize(model=module, model_parameters=groups, config=config)[0]


def plain_module(name: str, grid: triax.Grid) -> Any:
    dtype = torch.float32 if name == "fp16" else torch.float64
    x = [[((37 * i + 11 * j) % 101) / 64 - 0.75 for j in range(6)] for i in range(40)]
    y = [[row[0] + row[1], row[2] - row[3], row[4]] for row in x]
    data = torch.utils.data.TensorDataset(torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype))
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    return triax.initialize(model=module, config=EXPECTED[name]["config"], training_data=data, grid=grid)[0]


def take_steps(name: str, engine: Any, count: int) -> list[list[float]]:
    """Losses of the next steps, and gradient norms."""
    first, losses, norms = engine.global_steps + 1, [], []
    batches = iter(()) if "model" in EXPECTED[name] else epochs(engine.training_dataloader)
    for step in range(first, first + count):
        if "model" in EXPECTED[name]:
            sizes, config, data = EXPECTED[name]["model"], EXPECTED[name]["config"], engine.grid.data
            length, size = sizes["sequence_length"], config["train_batch_size"]
            rows = torch.tensor(
                [
                    [
                        (5 * step + 3 * row + row * t + t * t * (1 + row % 2)) % sizes["vocab_size"]
                        for t in range(length + 1)
                    ]
                    for row in range(size)
                ]
            )
            share = size // data.size
            mine = rows[data.rank * share : (data.rank + 1) * share].split(config["train_micro_batch_size_per_gpu"])
            losses.append(float(engine.train_batch(iter([(part[:, :-1], part[:, 1:]) for part in mine]))))
        else:
            inputs, labels = next(batches)
            loss = (engine(inputs).double() - labels.double()).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    return [losses, norms]


def epochs(loader: Any) -> Any:
    while True:
        yield from loader


def resumed(name: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """The state of each rank after loading, and the losses and norms of two steps."""
    grid = triax.Grid(pipe=sizes[0], data=sizes[1], tensor=sizes[2], timeout=60)
    engine = language_model(name, grid) if "model" in EXPECTED[name] else plain_module(name, grid)
    path, client = engine.load_checkpoint(FIXTURES / name)
    assert path == str(checkpoint(name))
    loaded = {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "client_state": {key: readable(value) for key, value in client.items()},
        "lr": [rate.hex() for rate in engine.get_lr()],
        "loss_scale": engine.loss_scale(),
        "weights": digest_of_all(engine.gather()),
    }
    losses, norms = take_steps(name, engine, 2)
    if hasattr(engine, "leave"):
        engine.leave()
    return {"loaded": loaded, "losses": losses, "norms": norms}


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[f"{name}-{sizes}" for name, sizes in CASES])
def test_an_old_checkpoint_is_loaded_bit_for_bit(ranks: Any, name: str, sizes: str) -> None:
    """The grid that wrote it and other grids load it; the next steps are those of the old version."""
    pipe, data, tensor = map(int, sizes.split("x"))
    found = ranks(pipe * data * tensor, resumed, name, (pipe, data, tensor), timeout=120)
    expected = EXPECTED[name]["resumed"][sizes]
    for rank, each in enumerate(found):
        wanted = expected[rank if len(expected) > 1 else 0]
        assert each["loaded"] == wanted["loaded"], f"rank {rank}"
        near = {"fp16": 2e-2, "llama": 1e-4}.get(name, 1e-9)  # other kernels round otherwise
        losses = [float.fromhex(value[0]) for value in wanted["after"]["loss"]]
        norms = [None if value is None else float.fromhex(value) for value in wanted["after"]["grad_norm"]]
        assert each["losses"] == pytest.approx(losses, rel=near) and each["norms"] == pytest.approx(norms, rel=near)


@pytest.mark.parametrize("name", EXPECTED)
def test_old_checkpoints_hold_the_recorded_tensors(name: str) -> None:
    path = checkpoint(name)
    index = read_index(path)
    assert not [*verify(path, index)]
    tensors = Reader(path, index).snapshot.tensors
    found = {n: digest(each.read_all())[:16] for n, each in tensors.items() if not n.startswith("random/")}
    assert found == EXPECTED[name]["stored"]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_an_old_checkpoint_exports_to_hugging_face(name: str, tmp_path: Path) -> None:
    """The index has the field names of triax 0.1.0, such as ``width`` for ``hidden_size``."""
    output_of("checkpoint", "export", FIXTURES / name, tmp_path, "--format", "hf")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("transformers_version", None)
    assert config == EXPECTED[name]["hf"]["config"]
    tensors = {
        n: each for file in tmp_path.glob("*.safetensors") for n, each in safetensors.torch.load_file(file).items()
    }
    assert {n: digest(each)[:16] for n, each in tensors.items()} == EXPECTED[name]["hf"]["tensors"]
