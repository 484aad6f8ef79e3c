"""A machine as ``triax machine measure`` describes it, with round figures: 2 cores that all ranks share."""

from __future__ import annotations

from dataclasses import replace

from triax.plugins.plan.machine import MACHINES
from triax.plugins.plan.measured import MeasuredTimes

_KERNELS = (
    "layer_norm",
    "gelu",
    "add",
    "accumulate",
    "bias",
    "by_heads",
    "loss",
    "embedding",
    "square",
    "rms_norm",
    "gated",
    "rotated",
)
_LINK = ((2.0, 1e3, 1e-4), (2.0, 1e6, 1e-3), (8.0, 1e3, 3e-4), (8.0, 1e6, 2e-3))
MEASURED = MeasuredTimes(
    cores=2,
    threads=1,
    crowding=((1.0, 1.0), (2.0, 0.9), (8.0, 0.8)),
    in_step={"GPTBlock": 1.0},
    products={"fp32": ((64.0, 64.0, 64.0, 0.5, 0.4, 0.3), (1024.0, 1024.0, 1024.0, 1.0, 0.9, 0.8))},
    attention={"fp32": ((64.0, 64.0, 0.3, 0.2),)},
    kernels={"fp32": dict.fromkeys(_KERNELS, ((1024.0, 1e-09, 2e-09),))},
    optimizer=((1e6, 2e-9),),
    collectives=dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "message"), _LINK),
    calls={"tensor": 1e-4, "data": 2e-4},
    layers={"GPTBlock": (2e-4, 3e-4)},
    microbatch=(1e-4, 2e-4),
    step=1e-3,
)
HERE = replace(MACHINES["cpu"], name="here", measured=MEASURED)
