"""Descriptions of machines: speed of products, memory and links, each figure with its source.

A description is one of ``MACHINES``, or a JSON or TOML file with the fields of ``Machine``. A file may start from one
of them: ``{"base": "h100-80g", "memory": 60e9}``. A file that changes a figure on which the fitted ones depend loses
their sources: ``Machine.unfitted`` then says that nothing is fitted to runs of this machine.

>>> machine("h100-80g").peak["bf16"] / 1e12
989.0
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...base.errors import close, describe, nearest
from ...base.files import distinct_keys, parse_json, read_text
from .measured import MeasuredTimes


@dataclass(frozen=True)
class NetworkLink:
    """One level of the network: its ranks reach each other over it, those of a lower level over that one.

    Attributes:
        name: ``node``, ``switch`` or ``network``.
        ranks: ranks that one unit of this level connects; 0: all.
        bandwidth: bytes a second of one rank in one direction, as the manufacturer states it.
        latency: seconds until the first byte of a message arrives.
        efficiency: share of the bandwidth that long messages reach.
    """

    name: str
    ranks: int
    bandwidth: float
    latency: float
    efficiency: float

    @property
    def speed(self) -> float:
        """Bytes a second of long messages."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Machine:
    """Cluster of equal ranks, as the cost model sees it.

    Attributes:
        name: name of the description.
        peak: floating-point operations a second of one rank's products, by dtype.
        memory: bytes of one rank.
        bandwidth: bytes a second between a rank's processor and its memory.
        links: levels of the network, the innermost first; the last one connects all ranks.
        units: processors of a rank that compute one tile of a product each (streaming multiprocessors).
        tile: rows and columns of such a tile.
        product_efficiency: share of ``peak`` that a long product of full tiles reaches (fitted).
        bandwidth_efficiency: share of ``bandwidth`` that elementwise kernels reach, the gaps between them included
            (fitted).
        attention_efficiency: share of ``peak`` that fused attention reaches.
        fused_attention: attention is one kernel that keeps the scores on chip (FlashAttention); False: the scores are
            written to memory and read again.
        overlap_tensor: the tensor axis sums the gradients of a product's inputs, and gathers its inputs again, while
            the backward pass computes products; False: behind them.
        overlap_messages: messages between stages arrive during the passes of other microbatches; False: each pass waits
            for its own.
        overlap_gradients: gradients are reduced during the backward pass of the last microbatch; False: behind it.
        overlap_pipelined_gradients: the same with several stages.
        overlap_weights: weights are gathered during the forward pass of the first microbatch (ZeRO stages 1 and 2);
            False: before it.
        message_overhead: seconds that a message between stages takes beyond its latency and its bytes, because the
            software waits for it and the device then for its next kernels.
        host_bandwidth: bytes a second between a rank and the CPU's memory.
        host_memory_bandwidth: bytes a second of the CPU's memory, divided by the ranks of a node.
        fused_kernels: the gate of an MLP and rotary positions are kernels that keep their inputs alone for the backward
            pass (Transformer Engine); False: as triax computes them.
        fitted_models: parameters of the models to whose runs the figures are fitted.
        fitted_error: root mean square of the leave-one-out errors of these runs (logarithms); 0: not known.
        measured: times by size that ``triax machine measure`` has found, which go before the efficiencies above.
        sources: field -> source of its figure; those of the two fitted ones begin with "fitted".
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    links: tuple[NetworkLink, ...]
    units: int
    tile: tuple[int, int] = (256, 128)
    product_efficiency: float = 0.8
    bandwidth_efficiency: float = 0.75
    attention_efficiency: float = 0.5
    fused_attention: bool = True
    overlap_tensor: bool = True
    overlap_messages: bool = False
    overlap_gradients: bool = True
    overlap_pipelined_gradients: bool = True
    overlap_weights: bool = False
    message_overhead: float = 0.0
    host_bandwidth: float = 25e9
    host_memory_bandwidth: float = 25e9
    fused_kernels: bool = False
    fitted_models: tuple[float, ...] = ()
    fitted_error: float = 0.0
    measured: MeasuredTimes | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self) if each.type in ("float", "int")}
        numbers |= {f"tile.{index}": size for index, size in enumerate(self.tile)}
        numbers |= {f"peak.{dtype}": speed for dtype, speed in self.peak.items()}
        for number, link in enumerate(self.links):
            numbers |= {f"links.{number}.{name}": getattr(link, name) for name in ("bandwidth", "efficiency")}
        for name in ("message_overhead", "fitted_error"):
            if not 0 <= numbers.pop(name) < float("inf"):
                raise ValueError(f"{name} of the machine {self.name} is {getattr(self, name)}. Give a number, or 0.")
        for name, value in numbers.items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} of the machine {self.name} is {value}. Give a positive number.")
        if not self.links or self.links[-1].ranks:
            raise ValueError(
                f"the last link of the machine {self.name} must connect all ranks. Give a link with ranks=0."
            )

    def peak_of(self, dtype: str) -> float:
        """Return the floating-point operations a second of products in a dtype.

        Raises:
            ValueError: the description has no figure for it.
        """
        if dtype not in self.peak:
            raise ValueError(
                f"the machine {self.name} has no peak for {dtype}. Give one of {', '.join(self.peak)}, or a machine "
                "file with it."
            )
        return self.peak[dtype]

    @property
    def elementwise_speed(self) -> float:
        """Bytes a second of elementwise kernels."""
        return self.bandwidth * self.bandwidth_efficiency

    def unfitted(self, precision: str) -> str | None:
        """Return the reason why no run confirms the figures; None if they are fitted to runs, or measured."""
        if self.measured is not None:
            return None
        missing = [name for name in FITTED if not self.sources.get(name, "").startswith("fitted")]
        if missing:
            figures = (f"{name} {getattr(self, name)} ({self.sources.get(name, 'assumed')})" for name in missing)
            return f"not fitted to any run of it: {', '.join(figures)}"
        if precision not in _FITTED_IN:
            return f"fitted to runs in {' and '.join(_FITTED_IN)}, not in {precision}"
        return None

    def from_data_sheet(self) -> Machine:
        """Return this machine as if no run of it were known: with the figures assumed for all machines."""
        links = tuple(replace(link, efficiency=ASSUMED_LINKS) for link in self.links)
        kept = {name: source for name, source in self.sources.items() if name not in ASSUMED}
        return replace(self, links=links, sources=kept, fitted_models=(), fitted_error=0.0, measured=None, **ASSUMED)

    def to_dict(self) -> dict[str, Any]:
        """Return the description as a machine file holds it."""
        return asdict(self)


def machine(name: str) -> Machine:
    """Return a machine by name, or read it from a .json or .toml file.

    Raises:
        ValueError: there is no such machine, or the file is not a description.
    """
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if path.suffix not in (".json", ".toml"):
        near = close(name, MACHINES)
        guess = f" Did you mean {near}?" if near else ""
        raise ValueError(
            f"there is no machine {name!r}.{guess} Give one of {', '.join(MACHINES)}, or a .json or .toml file."
        )
    try:
        content = read_text(path)
        is_json = path.suffix == ".json"  # TOML refuses keys that stand twice by itself
        values = parse_json(content, object_pairs_hook=distinct_keys) if is_json else tomllib.loads(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping of fields to values")
    except OSError as error:
        raise ValueError(f"the machine file {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"the machine file {path} is not a description: {error}.") from None
    base = values.pop("base", None)
    if base is not None and (not isinstance(base, str) or base not in MACHINES):
        hint = nearest(str(base), MACHINES)
        raise ValueError(f"the machine file {path}: base is {describe(base)}, which is no machine's name; {hint}")
    start: dict[str, Any] = {"name": path.stem} if base is None else MACHINES[base].to_dict()
    if base is not None and isinstance(values.get("sources", {}), Mapping):
        stale = {name for name in values if values[name] != start.get(name)}
        stale |= set(FITTED) if stale & set(_HARDWARE) else set()
        kept = {name: source for name, source in start["sources"].items() if name not in stale}
        values = {**values, "sources": kept | values.get("sources", {})}
    try:
        return _made(Machine, start | values)
    except ValueError as error:
        raise ValueError(f"the machine file {path}: {error}") from None


_PARTS = {"NetworkLink": NetworkLink, "MeasuredTimes": MeasuredTimes}
_TABLES = {"Row": "tuple[float, ...]", "Table": "tuple[Row, ...]"}
# Fields that say what the software of a run does, beside message_overhead.
SWITCHES = (
    *("fused_attention", "fused_kernels", "overlap_tensor", "overlap_messages", "overlap_gradients"),
    *("overlap_pipelined_gradients", "overlap_weights"),
)
_KINDS = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def _made(cls: Any, values: Any, place: str = "") -> Any:
    """Return a ``Machine`` or a ``NetworkLink`` of a file's values.

    Raises:
        ValueError: an unknown, missing or wrong field; the message begins with its name.
    """
    known = {each.name: each for each in fields(cls)}
    if not isinstance(values, Mapping):
        raise ValueError(f"{place.rstrip('.')} = {describe(values)}: give a mapping of {', '.join(known)}.")
    wrong = [name for name in values if name not in known]
    wrong += [name for name, each in known.items() if name not in values and _is_needed(each)]
    if wrong:
        what = "is missing" if wrong[0] in known else "is unknown"
        raise ValueError(f"{place}{wrong[0]} {what}. The fields are {', '.join(known)}.")
    return cls(**{name: _value(str(known[name].type), values[name], f"{place}{name}") for name in values})


def _is_needed(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _value(kind: str, value: Any, place: str) -> Any:
    """Return a field's value as its annotation has it."""
    kind = _TABLES.get(kind, kind)
    if kind.startswith("Mapping[str, "):
        if not isinstance(value, Mapping):
            raise ValueError(f"{place} = {describe(value)}: give a mapping.")
        inner = kind.removeprefix("Mapping[str, ").removesuffix("]")
        return {name: _value(inner, each, f"{place}.{name}") for name, each in value.items()}
    kind = kind.removesuffix(" | None")
    if kind in _PARTS:
        return None if value is None else _made(_PARTS[kind], value, f"{place}.")
    if kind.startswith("tuple["):
        if not isinstance(value, (list, tuple)) or (kind == "tuple[int, int]" and len(value) != 2):
            raise ValueError(
                f"{place} = {describe(value)}: give a list{' of two' if kind == 'tuple[int, int]' else ''}."
            )
        inner = kind.removeprefix("tuple[").partition(",")[0]
        return tuple(_value(inner, each, f"{place}.{number}") for number, each in enumerate(value))
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        names = {"str": "a text", "bool": "true or false", "int": "a whole number", "float": "a number"}
        raise ValueError(f"{place} = {describe(value)}: give {names[kind]}.")
    return value


# Figures of a machine of which only the data sheet is known: round shares of what it states. Within a step collectives
# reach less than in a loop of their own: on the A100 0.45 of InfiniBand's bandwidth, where nccl-tests have 0.8.
ASSUMED: dict[str, Any] = {"product_efficiency": 0.6, "bandwidth_efficiency": 0.5, "attention_efficiency": 0.5}
ASSUMED_LINKS = 0.5
# The figures that are fitted to published runs (tests/support/published_runs.py).
FITTED = ("product_efficiency", "bandwidth_efficiency")
_FITTED_IN = ("bf16", "fp16")  # of the runs
# Figures of which another value makes it another machine than that of the runs. The rest is software and the host.
_HARDWARE = ("peak", "bandwidth", "links", "units", "tile", "attention_efficiency", *FITTED)
_NCCL = "busbw of long messages by nccl-tests: about 230 of 300 GB/s over NVLink, 20 of 25 GB/s over InfiniBand"
_SIMUMAX = (
    "fitted to SimuMax's 26 runs on 8 B200 (benchmarks/published/b200.csv) by triax machine fit, from the figures "
    "assumed for all machines"
)
_FITTED = "fitted to published runs: docs/plan.md"


def _gpu(
    name: str,
    tflops: float,
    memory: float,
    bandwidth: float,
    units: int,
    nvlink: float,
    network: float,
    switch: int,
    sheet: str,
    efficiency: float = 0.8,
    node: float = 0.75,
    **others: Any,
) -> Machine:
    """Make the description of GPUs in nodes of 8, each with a network card of its own (DGX SuperPOD)."""
    links = (
        NetworkLink("node", 8, nvlink, 10e-6, node),
        NetworkLink("switch", switch, network, 15e-6, efficiency),
        NetworkLink("network", 0, network, 20e-6, efficiency),
    )
    sources = {
        "peak": sheet,
        "memory": sheet,
        "bandwidth": sheet,
        "units": sheet,
        "links": f"{sheet}; efficiency: {_NCCL}; a full-bisection fat tree",
        "tile": "cuBLAS's largest common tile of 16-bit products",
        "product_efficiency": _FITTED,
        "bandwidth_efficiency": _FITTED,
        **({"fitted_models": _FITTED} if "fitted_models" in others else {}),
        "host_bandwidth": "PCIe x16 of the node",
        **others.pop("sources", {}),
    }
    peaks = {"bf16": tflops * 1e12, "fp16": tflops * 1e12, "fp32": tflops * 0.5e12, "fp64": tflops * 0.0625e12}
    peaks |= dict.fromkeys(others.pop("narrow", ()), 2 * tflops * 1000000000000.0)  # of products' operands
    return Machine(name, peaks, memory, bandwidth, links, units, sources=sources, **others)


_FLASH2 = "FlashAttention-2, arXiv:2307.08691, figure 4: up to 72 % of an A100's peak forward, 63 % backward"
_FLASH3 = "FlashAttention-3, arXiv:2407.08608, section 4.1: 350 to 650 of an H100's 989 TFLOP/s"

MACHINES: dict[str, Machine] = {
    each.name: each
    for each in (
        _gpu(
            *("a100-80g", 312, 80e9, 2.039e12, 108, 300e9, 25e9, 160, "NVIDIA A100 80GB SXM data sheet"),
            efficiency=0.45,
            product_efficiency=0.75,
            bandwidth_efficiency=0.609,
            fused_attention=False,
            overlap_pipelined_gradients=False,
            message_overhead=0.8e-3,
            fitted_models=(1770195456.0, 18764328960.0, 530649395200.0),
            sources={
                "links": "NVIDIA A100 80GB SXM data sheet; 0.75 of NVLink by nccl-tests; 0.45 of InfiniBand, because "
                "arXiv:2104.04473, section 5.9, has 892 GB/s between the 48 ranks each of two stages, both directions "
                "together, and about 13 TB/s at the 1,024 places where 512 rings of replicas cross the middle; in "
                "arXiv:2205.05198, section 6.3, eight replicas take 1.32 s longer than one for 13 GB of gradients",
                "fused_attention": "the runs that it is fitted to (arXiv:2104.04473) came before FlashAttention",
                "overlap_pipelined_gradients": "the same runs had torch's DistributedDataParallel with one stage, and "
                "all-reduced behind the last pass with several",
                "message_overhead": "the same runs synchronized the device at each message. Section 5.3.2, without "
                "scatter/gather 1F1B wins at large batches: above 0.2 ms; 5.7, scatter/gather gains 11 %: 0.9 ms; "
                "table 1's 530B, interleaved, against table 2's, which is not: 1.2 ms",
                "attention_efficiency": _FLASH2,
            },
        ),
        _gpu(
            *("h100-80g", 989, 80e9, 3.35e12, 132, 450e9, 50e9, 256, "NVIDIA H100 SXM data sheet"),
            narrow=("fp8",),
            product_efficiency=0.653,
            bandwidth_efficiency=0.363,
            overlap_weights=True,
            fitted_models=(1753862144.0, 177233092608.0),
            host_bandwidth=50e9,
            sources={
                "attention_efficiency": _FLASH3,
                "overlap_weights": "the runs that it is fitted to, Megatron-core's; triax gathers between the steps",
            },
        ),
        _gpu(
            *("h200", 989, 141e9, 4.8e12, 132, 450e9, 50e9, 256, "NVIDIA H200 SXM data sheet"),
            narrow=("fp8",),
            product_efficiency=0.653,
            bandwidth_efficiency=0.363,
            host_bandwidth=50e9,
            sources={
                "product_efficiency": "of the h100-80g, which has the same processor",
                "bandwidth_efficiency": "of the h100-80g",
                "attention_efficiency": _FLASH3,
            },
        ),
        _gpu(
            *("b200", 2250, 180e9, 7.7e12, 148, 900e9, 50e9, 256, "NVIDIA DGX B200 data sheet, dense"),
            narrow=("fp8", "mxfp8"),
            node=0.3497,
            product_efficiency=0.5065,
            bandwidth_efficiency=0.4727,
            attention_efficiency=0.3632,
            host_bandwidth=50e9,
            fitted_models=(12369207296.0, 13302912000.0, 17087741952.0, 36958706688.0),
            fitted_error=0.0362,
            sources={
                "product_efficiency": _SIMUMAX,
                "bandwidth_efficiency": _SIMUMAX,
                "attention_efficiency": _SIMUMAX,
                "links": f"NVIDIA DGX B200 data sheet; efficiency of NVLink: {_SIMUMAX}; of the network: {_NCCL}",
                "fitted_models": _SIMUMAX,
                "fitted_error": _SIMUMAX,
            },
        ),
        Machine(
            "cpu",
            {"fp32": 60e9, "fp64": 30e9, "bf16": 20e9, "fp16": 10e9},
            4e9,
            10e9,
            (NetworkLink("node", 0, 2e9, 100e-6, 1.0),),
            units=1,
            tile=(8, 16),
            fused_attention=True,
            attention_efficiency=0.3,
            host_bandwidth=10e9,
            host_memory_bandwidth=10e9,
            sources={
                "peak": "one core with AVX2 at about 2 GHz: 16 fused multiply-adds a cycle; measure yours",
                "memory": "assumed",
                "bandwidth": "assumed: one core's share of a memory channel",
                "links": "gloo over loopback: about 105 microseconds an operation",
            },
        ),
    )
}
