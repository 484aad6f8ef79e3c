"""Weights to another program over a process group: transformers' model there gives the trainer's logits."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import triax
from triax.models.config import LlamaConfig

from support.processes import free_port

SHAPE: dict[str, Any] = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
GRIDS: list[tuple[dict[str, int], int]] = [({"pipe": 2, "tensor": 2}, 1), ({"pipe": 2, "data": 2}, 3)]
RECEIVER = f"""
import sys, threading, torch, transformers
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from triax import receive_weights, transfer_group

LlamaRMSNorm.forward = lambda self, x: self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{SHAPE}, rms_norm_eps=1e-5)).double()
ids = torch.arange(24).view(2, 12)

def keep_half(address, kept):  # a rank of a tensor axis of 2, which cuts its shard of each matrix
    group = transfer_group(address, 2, 3)
    for _ in range(2):
        kept.append({{n: t.chunk(2)[1].clone() if t.dim() == 2 else t for n, t in receive_weights(group)}})

for number, address in enumerate(sys.argv[2:]):
    kept = []
    other = threading.Thread(target=keep_half, args=(address, kept))
    other.start()
    group, found = transfer_group(address, 1, 3), {{}}
    for call in range(2):
        missing = dict(model.named_parameters())
        for name, tensor in receive_weights(group):
            missing.pop(name).data.copy_(tensor)  # a KeyError: a name that the model does not have
        assert not missing, missing
        with torch.no_grad():
            found[f"logits{{call}}"] = model(ids).logits
        found["names"] = torch.tensor(len(list(model.parameters())))
        mine = {{n: p.detach().clone() for n, p in model.named_parameters()}}
        if call:
            other.join()
            for name, part in kept[1].items():
                assert torch.equal(part, mine[name].chunk(2)[1] if part.dim() == 2 else mine[name])
    save_file(found, f"{{sys.argv[1]}}/{{number}}.safetensors")
"""


def live() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # torch's own fake tensors have no storage
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


def sent(address: str, sizes: dict[str, Any], zero: Any) -> Any:
    """Send before and after a step; return logits, the bytes sent, and what an iteration held at the most."""
    grid = triax.Grid(**sizes)
    config = LlamaConfig(**SHAPE, rms_norm_eps=1e-5)
    loss_fn = triax.NextTokenLoss(grid, vocab_size=48)
    module = triax.PipelineModule(triax.llama_layers(config), grid=grid, loss_fn=loss_fn, dtype=torch.float64)
    optimizer = partial(torch.optim.SGD, lr=1.0)
    engine = triax.Engine(module, optimizer=optimizer, batch=triax.Batch(size=4, microbatch=2), zero=zero)
    weights = triax.HuggingFaceWeights(engine)
    group = triax.transfer_group(address, 0, 3) if grid.rank == 0 else None
    ids = torch.arange(24).view(2, 12)
    logits, counts = [], []
    for _ in range(2):
        counts.append(triax.send_weights(weights, group))
        _, (first, *_) = engine.eval_batch(iter([(ids, ids)] * 4), return_logits=True)
        logits.append(first)
        engine.train_batch(iter([(ids, ids)] * 4))
    before, most = live(), 0
    for name, tensor in weights:
        assert (tensor is None) == (grid.rank > 0) and name in weights.shapes
        most = max(most, live() - before)
    return logits, counts, most, {name: torch.Size(shape).numel() * 8 for name, (shape, _) in weights.shapes.items()}


def test_a_receiver_of_sent_weights_has_the_trainers_logits(ranks: Any, tmp_path: Path) -> None:
    """The trainers are pipe 2 x tensor 2 and ZeRO 3, before and after a step; a receiver keeps half of each matrix."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in GRIDS]
    line = [sys.executable, "-c", RECEIVER, str(tmp_path), *addresses]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as receiver:
        try:
            found = [ranks(4, sent, address, *given) for address, given in zip(addresses, GRIDS, strict=True)]
            _, error = receiver.communicate(timeout=60)
        finally:
            receiver.kill()
    assert receiver.returncode == 0, error
    for number, results in enumerate(found):
        got = load_file(tmp_path / f"{number}.safetensors")
        shards = GRIDS[number][0].get("tensor", 1)  # of the vocabulary, on neighboring ranks
        for call in range(2):
            logits = torch.cat([each[0][call] for each in results[:shards]], dim=-1)
            torch.testing.assert_close(got[f"logits{call}"], logits, atol=1e-10, rtol=0)
        assert not torch.equal(got["logits0"], got["logits1"])
        (_, (first, second), most, sizes), *others = results
        total, layer = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers.0." in name)
        assert first == second and 0 < first - total - 8 < 100 * len(sizes)  # the list of names
        assert all(each[1] == [0, 0] for each in others)
        assert 0 < most <= 2 * max(sizes.values()) + layer < total, (most, layer, total)


def test_wrong_arguments_of_a_transfer_group_are_refused() -> None:
    for address, rank, message in (("localhost", 0, "give host:port"), ("localhost:99", 3, "rank is 3 of 3")):
        with pytest.raises(ValueError, match=message):
            triax.transfer_group(address, rank, 3)
    module = triax.PipelineModule(triax.llama_layers(LlamaConfig(**SHAPE)))
    with pytest.raises(ValueError, match="rank 0 has no group"):
        triax.send_weights(triax.HuggingFaceWeights(module), None)
