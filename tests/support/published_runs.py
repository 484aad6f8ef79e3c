"""Fit of the cost model to published tables, and its errors on the rows that were not fitted.

Two figures of a machine are fitted: ``product_efficiency`` and ``bandwidth_efficiency``, on at most two rows of
each of its tables. All others are from data sheets and measurements of others (plugins/plan/machine.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from triax.models.config import GPTConfig
from triax.plugins.plan.cost import CostModel
from triax.plugins.plan.fit import MeasuredRun
from triax.plugins.plan.machine import Machine, machine
from triax.plugins.plan.memory import ModelMemory
from triax.plugins.plan.parallel_layout import ParallelLayout
from triax.plugins.plan.work import Work


@dataclass(frozen=True)
class PublishedRun:
    """Published run: model, layout, and TFLOP/s of a GPU as the source counts them, or seconds of a step.

    ``microbatch`` and ``chunks`` are 0 where the source does not give them.
    """

    model: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipe: int
    gpus: int
    batch: int
    microbatch: int
    chunks: int
    tflops: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class PublishedTable:
    """Table of published runs on one machine.

    Attributes:
        name: source.
        recomputed: the source counts recomputed operations in its TFLOP/s.
        fitted: numbers of the rows that the machine's figures are fitted to.
    """

    name: str
    machine: str
    sequence: int
    vocabulary: int
    recompute: str
    zero: int
    recomputed: bool
    rows: tuple[PublishedRun, ...]
    fitted: tuple[int, ...] = ()

    def config(self, row: PublishedRun) -> GPTConfig:
        """Return the model of a row."""
        sizes = self.vocabulary, self.sequence, row.hidden, row.layers, row.heads
        return GPTConfig(*sizes, tie_word_embeddings=self.recomputed)

    def seconds(self, row: PublishedRun) -> float:
        """Return the published seconds of a step (Narayanan et al. 2021, equation 3)."""
        if row.step:
            return row.step
        b, s, h, layers, v = row.batch, self.sequence, row.hidden, row.layers, self.vocabulary
        passes, head = (96, 16) if self.recomputed else (72, 12)
        flops = passes * b * s * layers * h**2 * (1 + s / (6 * h) + v / (head * layers * h))
        return flops / (row.gpus * row.tflops * 1e12)

    def layouts(self, row: PublishedRun) -> list[ParallelLayout]:
        """Return the layouts that a row may have meant: one, or all with the figures that it leaves out."""
        data = row.gpus // row.tensor // row.pipe
        found = []
        for microbatch in [row.microbatch] if row.microbatch else [1, 2, 4, 8]:
            if row.batch % (data * microbatch):
                continue
            m = row.batch // data // microbatch
            each = row.layers // row.pipe
            chunks = [row.chunks] if row.chunks else [v for v in range(1, each + 1) if each % v == 0]
            for v in chunks if row.pipe > 1 else [1]:
                if v > 1 and m % row.pipe:
                    continue
                schedule = "interleaved" if v > 1 else "1f1b"
                found.append(
                    ParallelLayout(
                        *(row.pipe, data, 1, row.tensor, 1, microbatch, v, schedule, self.zero, self.recompute)
                    )
                )
        return found


def _rows(*rows: tuple[str | float, ...]) -> tuple[PublishedRun, ...]:
    return tuple(PublishedRun(*row) for row in rows)  # type: ignore[arg-type]


# The runs of Narayanan et al. 2021 and Korthikanti et al. 2022 all-reduced gradients without ZeRO; they are evaluated
# with stage 1 and without dropout, as `triax plan --layout ...,zero=1` does.
NARAYANAN = PublishedTable(
    *("Narayanan et al. 2021, table 1", "a100-80g", 2048, 51200, "full", 1, True),
    _rows(
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
        ("18B", 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
        ("39B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
        ("76B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
        ("145B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
        ("310B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
        ("530B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
        ("1T", 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
    ),
    (0, 3),
)
STRONG_SCALING = replace(
    NARAYANAN,
    name="Narayanan et al. 2021, table 2",
    rows=_rows(
        *(("175B", 96, 12288, 96, 8, 12, gpus, 1536, 1, 1, tflops) for gpus, tflops in ((384, 153), (768, 149))),
        ("175B", 96, 12288, 96, 8, 12, 1536, 1536, 1, 1, 141),
        *(("530B", 128, 20480, 105, 8, 35, gpus, 2240, 1, 1, tflops) for gpus, tflops in ((560, 171), (1120, 167))),
        ("530B", 128, 20480, 105, 8, 35, 2240, 2240, 1, 1, 159),
    ),
    fitted=(),
)
# Korthikanti et al. 2022, arXiv:2205.05198, table 5, and section 6.3 for 2,240 GPUs
KORTHIKANTI = replace(
    NARAYANAN,
    name="Korthikanti et al. 2022, full recomputation",
    rows=_rows(
        ("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1, 0, 1.42),
        ("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3, 0, 18.13),
        ("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3, 0, 49.05),
        ("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1, 0, 94.42),
    ),
    fitted=(),
)
KORTHIKANTI_SELECTIVE = replace(
    KORTHIKANTI,
    name="Korthikanti et al. 2022, selective recomputation",
    recompute="selective",
    rows=(
        *(replace(row, step=step) for row, step in zip(KORTHIKANTI.rows, (1.10, 13.75, 37.83, 71.49), strict=True)),
        replace(KORTHIKANTI.rows[2], gpus=2240, batch=2240, step=39.15),
    ),
    fitted=(2,),
)
# Megatron-core 0.8 on H100: its README. Microbatch and interleaving are not published.
MEGATRON_CORE = PublishedTable(
    *("Megatron-core 0.8", "h100-80g", 4096, 131072, "selective", 1, False),
    _rows(
        ("1.7B", 16, 2048, 24, 1, 1, 48, 192, 0, 0, 408.8),
        ("16B", 48, 6144, 32, 4, 1, 192, 192, 0, 0, 489.1),
        ("70B", 64, 8192, 84, 8, 2, 768, 384, 0, 0, 419.7),
        ("177B", 96, 12288, 96, 8, 6, 2304, 1152, 0, 0, 432.8),
        ("462B", 144, 18432, 112, 8, 16, 6144, 3072, 0, 0, 459.9),
    ),
    (0, 3),
)
# Megatron-LM's README: 175B on 96 to 4,608 H100 (47 % to 42 % of the peak), and on 1,024 A100, without chunks. They
# were looked up after the fit.
LATER_H100 = replace(
    MEGATRON_CORE,
    name="Megatron-LM's README, H100",
    rows=_rows(
        *(("175B", 96, 12288, 96, 8, 6, gpus, 1152, 0, 0, mfu * 989) for gpus, mfu in ((96, 0.47), (4608, 0.42)))
    ),
    fitted=(),
)
LATER_A100 = replace(
    NARAYANAN,
    name="Megatron-LM's README, A100",
    rows=_rows(("175B", 96, 12288, 96, 8, 16, 1024, 1536, 1, 1, 138)),
    fitted=(),
)
TABLES = (NARAYANAN, STRONG_SCALING, KORTHIKANTI, KORTHIKANTI_SELECTIVE, MEGATRON_CORE)


def measured_runs(table: PublishedTable) -> list[MeasuredRun]:
    """Return the rows of a table as ``triax machine fit`` has them."""
    on = machine(table.machine)
    return [
        MeasuredRun(
            *(row.model, table.config(row), tuple(_candidates(table, row, on))),
            *(row.batch, table.sequence, table.seconds(row)),
        )
        for row in table.rows
    ]


def predicted(table: PublishedTable, row: PublishedRun, on: Machine) -> tuple[float, ParallelLayout]:
    """Return the predicted seconds of a step, and the layout: the fastest of those that the row may have meant."""
    return _fastest(table, row, on, _candidates(table, row, on))


def _candidates(table: PublishedTable, row: PublishedRun, on: Machine) -> list[ParallelLayout]:
    """Return the layouts of a row. What it leaves out is chosen among what fits in memory, because the run did."""
    layouts = table.layouts(row)
    if len(layouts) > 1:
        memory = ModelMemory(table.config(row), fused_attention=on.fused_attention)
        layouts = [each for each in layouts if memory.peak(each, row.batch, table.sequence).total <= on.memory]
    return layouts


def _fastest(
    table: PublishedTable, row: PublishedRun, on: Machine, layouts: Sequence[ParallelLayout]
) -> tuple[float, ParallelLayout]:
    model = CostModel(Work(table.config(row), on, row.batch, table.sequence))
    return min(((model.step(layout).seconds, layout) for layout in layouts), key=lambda found: found[0])


def errors(table: PublishedTable, on: Machine) -> list[float]:
    """Return (predicted - published) / published seconds of each row."""
    return [predicted(table, row, on)[0] / table.seconds(row) - 1 for row in table.rows]


def fit(name: str) -> Machine:
    """Return a machine with the two figures that make the squared errors of the fitted rows of its tables least."""
    start = machine(name)
    rows = [(table, table.rows[number]) for table in TABLES if table.machine == name for number in table.fitted]
    layouts = [_candidates(table, row, start) for table, row in rows]

    def loss(products: float, bandwidth: float) -> float:
        on = replace(start, product_efficiency=products, bandwidth_efficiency=bandwidth)
        times = [_fastest(table, row, on, each)[0] for (table, row), each in zip(rows, layouts, strict=True)]
        return sum(math.log(time / table.seconds(row)) ** 2 for time, (table, row) in zip(times, rows, strict=True))

    best, step = (loss(0.8, 0.6), 0.8, 0.6), 0.1
    while step > 0.001:
        around = [
            (loss(a, b), a, b)
            for a in (best[1] - step, best[1], best[1] + step)
            for b in (best[2] - step, best[2], best[2] + step)
            if 0.2 <= a <= 1.0 and 0.2 <= b <= 1.0
        ]
        found = min(around)
        step, best = (step / 2 if found == best else step), found
    return replace(start, product_efficiency=round(best[1], 3), bandwidth_efficiency=round(best[2], 3))
