"""Mamba2 and Gated DeltaNet: the chunks are the recurrence as it is written, and the layers are transformers' modules,
in outputs and gradients, in float64."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triax.grid import Grid
from triax.grid.randomness.random import Normal
from triax.models.recurrent import mixer
from triax.models.recurrent.delta_net import GatedDeltaNet
from triax.models.recurrent.delta_rule import delta_rule
from triax.models.recurrent.mamba2 import Mamba2
from triax.models.recurrent.sizes import DeltaNetSizes, Mamba2Sizes
from triax.models.recurrent.state_space import state_space

from support.exact_norms import exact

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
ROWS, LENGTH, GROUPS, SHARED, KEYS, VALUES = 2, 24, 2, 3, 4, 5


def gradients(y: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return list(torch.autograd.grad((y * weights).sum(), tensors))


def arguments() -> list[Tensor]:
    """First and second vectors, values, logarithms of decays, strengths."""
    torch.manual_seed(2)
    heads = (ROWS, 1, LENGTH, GROUPS, SHARED)
    vectors = [F.normalize(torch.randn(*heads[:4], KEYS, dtype=torch.float64), dim=-1) for _ in range(2)]
    decays = -torch.rand(heads, dtype=torch.float64).exponential_()
    made = [*vectors, torch.randn(*heads, VALUES, dtype=torch.float64), decays, torch.rand(heads, dtype=torch.float64)]
    return [each.requires_grad_() for each in made]


def begins() -> Tensor:
    """Documents that begin within chunks, at their starts, and one behind the other."""
    found = torch.zeros(ROWS, 1, LENGTH, dtype=torch.bool)
    found[0, 0, [3, 8, 9, 10, 21]] = True
    found[1, 0, [0, 16, 23]] = True
    return found


def recurrence(kind: str, starts: Tensor | None, initial: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, the last state and the gradients, token by token and head by head."""
    given = arguments()
    first, second, values, logarithms, strengths = given
    last = torch.zeros(ROWS, GROUPS * SHARED, KEYS, VALUES, dtype=torch.float64)
    pieces: dict[tuple[int, ...], Tensor] = {}
    for b in range(ROWS):
        for g in range(GROUPS):
            for h in range(SHARED):
                head = g * SHARED + h
                state = torch.zeros(KEYS, VALUES).double() if initial is None else initial[b, head]
                for t in range(LENGTH):
                    if starts is not None and starts[b, 0, t]:
                        state = torch.zeros(KEYS, VALUES).double()
                    x, k, q = values[b, 0, t, g, h], second[b, 0, t, g], first[b, 0, t, g]
                    decay, beta = logarithms[b, 0, t, g, h].exp(), strengths[b, 0, t, g, h]
                    if kind == "delta":
                        state = decay * (state - beta * torch.outer(k, k @ state)) + beta * torch.outer(k, x)
                        pieces[b, t, g, h] = q @ state
                    else:  # the vectors are b, then c
                        state = decay * state + torch.outer(q, x * beta)
                        pieces[b, t, g, h] = k @ state
                last[b, head] = state.detach()
    outputs = torch.stack([pieces[place] for place in product(*map(range, (ROWS, LENGTH, GROUPS, SHARED)))])
    outputs = outputs.view(values.shape)
    return outputs.detach(), last, gradients(outputs, given)


@pytest.mark.parametrize("kind", ["mamba", "delta"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_chunked_state_space_and_delta_rule_equal_the_recurrence(kind: str, packed: bool) -> None:
    starts = begins() if packed else None
    initial = None if packed else torch.randn(ROWS, GROUPS * SHARED, KEYS, VALUES).double()
    right, last, slopes = recurrence(kind, starts, initial)
    for chunk in (1, 4, 8, 24):
        given = arguments()
        first, second, values, logarithms, strengths = given
        others: dict[str, Any] = {"chunk": chunk, "begins": starts, "initial": initial}
        if kind == "delta":
            y, state = delta_rule(first, second, values, logarithms, strengths, **others)
        else:
            y, state = state_space(values * strengths[..., None], logarithms, first, second, **others)
        close(y, right)
        close(state, last)
        for mine, slope in zip(gradients(y, given), slopes, strict=True):
            close(mine, slope)


# ------------------------------------------------------------------------------------------------ transformers


def theirs_mamba(**changes: Any) -> tuple[Any, dict[str, Any]]:
    import transformers
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    sizes = {"mamba_num_heads": 6, "mamba_head_dim": 5, "ssm_state_size": 7, "n_groups": 2, "chunk_size": 8} | changes
    config = transformers.NemotronHConfig(hidden_size=16, layers_block_type=["linear_attention"], **sizes)
    biases = config.use_conv_bias, config.use_bias
    ours = Mamba2Sizes(6, 5, 7, config.n_groups, 4, *biases, time_step_min=config.time_step_min)
    return NemotronHMamba2Mixer(config, 0), {"sizes": ours, "eps": config.layer_norm_epsilon}


def theirs_delta(**changes: Any) -> tuple[Any, dict[str, Any]]:
    import transformers
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {"linear_num_value_heads": 4, "linear_num_key_heads": 2} | changes
    sizes |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5}
    types = ["linear_attention"]
    config = transformers.Qwen3NextConfig(hidden_size=16, num_hidden_layers=1, layer_types=types, **sizes)
    ours = DeltaNetSizes(4, 5, config.linear_num_key_heads, 6)
    return Qwen3NextGatedDeltaNet(config, 0), {"sizes": ours, "eps": config.rms_norm_eps}


def ours_of(kind: str, tensors: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """transformers' tensors, or their gradients, by the names of ours."""
    found = {"a_log": tensors["A_log"], "dt_bias": tensors["dt_bias"], "out.weight": tensors["out_proj.weight"]}
    if kind == "delta":
        q, k, v, z = tensors["in_proj_qkvz.weight"].view(groups, -1, 16).split([6, 6, 20 // groups, 20 // groups], 1)
        b, a = tensors["in_proj_ba.weight"].view(groups, -1, 16).split([4 // groups] * 2, 1)
        joined = {"pair": (q, k), "value": (v,), "gate": (z,), "numbers": (b, a)}
        found |= {f"{name}.weight": torch.cat([p.flatten(0, 1) for p in parts]) for name, parts in joined.items()}
        pair, value = tensors["conv1d.weight"].split([12 * groups, 20])
        return found | {"conv_pair": pair, "conv_value": value, "norm.weight": tensors["norm.weight"]}
    for ending in ("weight", "bias"):
        if f"in_proj.{ending}" in tensors:
            parts = tensors[f"in_proj.{ending}"].split([30, 30, 14 * groups, 6])
            found |= {f"{n}.{ending}": p for n, p in zip(("gate", "value", "pair", "numbers"), parts, strict=True)}
            found[f"out.{ending}"] = tensors[f"out_proj.{ending}"]
        if f"conv1d.{ending}" in tensors:
            last = "" if ending == "weight" else "_bias"
            parts = tensors[f"conv1d.{ending}"].split([30, 14 * groups])
            found |= {f"{n}{last}": p for n, p in zip(("conv_value", "conv_pair"), parts, strict=True)}
    return found | {"skip": tensors["D"], "norm": tensors["norm.weight"]}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "mamba-biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "time_step_min": 0.5}),
    "delta": ("delta", {}),
    "delta-every-key": ("delta", {"linear_num_key_heads": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_recurrent_layers_equal_transformers_modules(case: str) -> None:
    kind, changes = CASES[case]
    theirs, arguments = (theirs_mamba if kind == "mamba" else theirs_delta)(**changes)
    theirs = theirs.double()
    torch.manual_seed(4)
    for parameter in theirs.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    make: Any = Mamba2 if kind == "mamba" else GatedDeltaNet
    ours: nn.Module = make(16, **arguments, grid=Grid(), init=Normal(1.0), out_init=Normal(1.0)).double()
    groups = arguments["sizes"].groups
    ours.load_state_dict(ours_of(kind, dict(theirs.named_parameters()), groups))
    x = torch.randn(2, mixer.CHUNK + 13, 16).double()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    with exact(theirs):
        right = theirs(inputs[0])
    y = ours(inputs[1])
    close(y, right)
    weights = torch.randn_like(y)
    (y * weights).sum().backward(), (right * weights).sum().backward()
    close(inputs[1].grad, inputs[0].grad)
    slopes = ours_of(kind, {name: p.grad for name, p in theirs.named_parameters()}, groups)
    assert slopes.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        close(parameter.grad, slopes[name], msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_recurrent_layers_treat_packed_documents_separately(kind: str) -> None:
    _, arguments = (theirs_mamba if kind == "mamba" else theirs_delta)()
    make: Any = Mamba2 if kind == "mamba" else GatedDeltaNet
    layer = make(16, **arguments, grid=Grid(), init=Normal(1.0), out_init=Normal(1.0)).double()
    torch.manual_seed(6)
    x, lengths = torch.randn(1, 100, 16).double(), [1, 2, 30, 31, 1, 35]  # a chunk ends behind the fourth
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))[None]
    packed = layer(x, documents)
    close(packed, torch.cat([layer(part) for part in x.split(lengths, 1)], 1))


def test_16_bit_layers_keep_their_state_in_fp32() -> None:
    _, arguments = theirs_mamba()
    layer = Mamba2(16, **arguments, grid=Grid(), init=Normal(0.3), out_init=Normal(0.3))
    x = torch.randn(2, 90, 16, generator=torch.Generator().manual_seed(0))
    right = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert (y - right).abs().max() < 0.03 * right.abs().max()
    y = layer.bfloat16()(x.bfloat16())
    assert (y - right).abs().max() < 0.05 * right.abs().max()
    y.float().sum().backward()
