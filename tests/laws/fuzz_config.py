"""Random configurations over every key of the schema: each is accepted, or refused by one clear line.

    python tests/laws/fuzz_config.py --seconds 60 --seed 1
    python tests/laws/fuzz_config.py --case '{"zero_optimization": {"stage": 4}}'

Values are right, of a wrong type, extreme, or contradict each other; keys are known, misspelt or in another section;
files are damaged JSON. What is accepted has sizes, notes and a resolved form that is accepted again with the same
values, and (some of them) an engine that takes a step. Any other error than a ConfigError of one line is a finding.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import logging
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch
from torch import nn

import triax
from triax.base.errors import AgreedError, ConfigError
from triax.compat.deepspeed.config.optimizer_names import NAMES as OPTIMIZER_NAMES
from triax.compat.deepspeed.config.table import keys
from triax.compat.deepspeed.config.to_options import batch_sizes, notes_of
from triax.compat.deepspeed.from_config import read_config, resolve_config
from triax.compat.deepspeed.lr_schedules import VALID_LR_SCHEDULES
from triax.engine.optim import optimizers, schedulers
from triax.pipe.schedules.choose import NAMES
from triax.testing.pool import slowdown
from triax.zero.offload import OffloadError

from support.paths import ROOT
from support.shrink import shrink
from support.toys import mean_loss

OPTIMIZERS = (*optimizers.names(), *OPTIMIZER_NAMES)
LIMIT = 20  # seconds that one configuration may take
LONGEST = 400  # characters of a message, for each key that it is about
FIELDS = dict(keys())
ACTING = [path for path, key in FIELDS.items() if key.status not in ("refused", "idle")]
# Values of every type, of which most keys refuse most.
STRANGE: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 7, -1, 16, 1000, 2**31, 2**63, 2**64, 10**30, -(10**30)),
    *(0.0, 0.5, 1.0, -0.5, 1e-300, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan, 3.0, 1e16),
    *(
        "",
        "auto",
        "none",
        "x",
        "fp16",
        "bf16",
        "1",
        "1e5",
        "true",
        "nan",
        "\0",
        "é" * 300,
        "a\nb",
        "../x",
        "/dev/null/x",
    ),
    *([], [1], [None], [[]], [0.9, 0.99], [1, 2, 3], [-1, 2], ["x"], [math.nan] * 3, [1e308] * 4, (1, 2)),
    *({}, {"enabled": True}, {"enabled": False}, {"type": "x"}, {"a": {"b": 1}}, {1: 2}, {"": 0}, {"params": None}),
]
SCHEDULES: list[dict[str, Any]] = [
    {},
    {"warmup_num_steps": 3},
    {"total_num_steps": 9, "warmup_num_steps": 3},
    {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    {"lr_range_test_min_lr": 0.1},
]
OBJECTS: list[Any] = [b"bytes", torch.float16, torch.ones(2), Path("x"), object(), {1, 2}, print]


# ---------------------------------------------------------------------------------------------------- configurations


def draw(choose: random.Random) -> dict[str, Any]:
    """Draw a configuration: a plain one with a few keys changed."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": choose.choice((1, 2, 4)),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    friendly = choose.random() < 0.6  # right values alone, which may contradict each other
    names = ACTING if friendly else [*FIELDS]
    for _ in range(choose.choice((1, 2, 3, 4, 6)) if friendly else choose.choice((1, 1, 2, 2, 3, 5, 8))):
        kind = 0.2 + 0.5 * choose.random() if friendly else choose.random()
        if kind < 0.12:
            config["optimizer"] = _named(choose, OPTIMIZERS, _optimizer_class)
        elif kind < 0.22 and not friendly:
            config["scheduler"] = _named(choose, schedulers.names(), schedulers.class_of)
        else:
            key = choose.choice(names)
            if kind < 0.3 and not friendly:
                key = _misspelt(choose, key)
            value = _right(choose, key) if kind < 0.75 else strange(choose)
            put(config, key, value)
            if friendly and f"{key.partition('.')[0]}.enabled" in FIELDS and choose.random() < 0.5:
                put(config, f"{key.partition('.')[0]}.enabled", True)
    if friendly and choose.random() < 0.3:
        params = {"lr": choose.choice((0.1, 1e-3, 0))} | ({"weight_decay": 0.1} if choose.random() < 0.5 else {})
        config["optimizer"] = {"type": choose.choice(OPTIMIZERS), "params": params}
    if friendly and choose.random() < 0.2:
        config["scheduler"] = {"type": choose.choice(VALID_LR_SCHEDULES), "params": choose.choice(SCHEDULES)}
    return config


def _named(choose: random.Random, known: Any, class_of: Any) -> Any:
    name = choose.choice([*known])
    params: dict[str, Any] = {}
    cls = class_of(name)
    arguments = [*inspect.signature(cls).parameters] if cls else ["lr"]
    for argument in choose.sample(arguments, min(len(arguments), choose.choice((0, 1, 2, 3)))):
        if argument not in ("self", "params", "optimizer"):
            params[argument] = choose.choice((1e-3, 10, True, [0.9, 0.99], strange(choose)))
    if choose.random() < 0.2:
        name = choose.choice((name.lower(), name + "x", "", "lambda", "Optimizer"))
    section: dict[str, Any] = {"type": name, "params": params}
    if choose.random() < 0.1:
        section[choose.choice(("type", "params", "lr", "legacy_fusion"))] = strange(choose)
    return section


def _optimizer_class(name: str) -> Any:
    return getattr(torch.optim, name, None)


def _misspelt(choose: random.Random, key: str) -> str:
    parts = key.split(".")
    way = choose.randrange(4)
    if way == 0:
        return ".".join([*parts[:-1], parts[-1][:-1]]) or "x"
    if way == 1:
        return parts[-1]
    if way == 2:
        return f"{choose.choice(('zero_optimization', 'fp16', 'pipeline', 'checkpoint'))}.{parts[-1]}"
    return f"{key}.{parts[-1]}"


def strange(choose: random.Random) -> Any:
    return choose.choice(OBJECTS if choose.random() < 0.05 else STRANGE)


def _right(choose: random.Random, key: str) -> Any:
    """Return a value of the key's own type, often an extreme one."""
    field = FIELDS.get(key)
    if key == "pipeline.schedule":
        return choose.choice((*NAMES, "x.json", "x.csv"))
    return strange(choose) if field is None else right_value(choose, field)


def right_value(choose: random.Random, field: Any) -> Any:
    """Return a value of a field's own type, often an extreme one."""
    kinds = _kinds(field.hint)
    literals = [kind for kind in kinds if not isinstance(kind, type)]
    if literals and choose.random() < 0.9:
        return choose.choice(literals)
    kind = choose.choice([kind for kind in kinds if isinstance(kind, type)] or [object])
    if kind is bool:
        return choose.choice((True, False))
    if kind in (int, float):
        extreme = choose.random() < 0.2
        common = (0, 1, 2, 3, 8, 100) if kind is int else (0.0, 0.5, 1.0, 2, 16.0)
        return choose.choice(
            (2**31, 2**62, -1) if extreme and kind is int else (1e-300, 1e300, -1.0) if extreme else common
        )
    if kind is str:
        return choose.choice(("x", "folder/x", "", "none"))
    if kind is type(None):
        return None
    if kind is tuple:
        return choose.choice(([1.0, 1.0, 1.0], [0, 0, 0], [1, 2, 3, 4], ["Linear"], ["all_reduce"], []))
    return strange(choose)


def _kinds(annotation: Any) -> list[Any]:
    """Return the types, and the values of a Literal, that an annotation names."""
    if get_origin(annotation) is Literal:
        return [*get_args(annotation)]
    if get_origin(annotation) is not None and get_args(annotation):
        if get_origin(annotation) in (tuple, dict, list):
            return [get_origin(annotation)]
        return [kind for each in get_args(annotation) for kind in _kinds(each)]
    return [annotation] if isinstance(annotation, type) else []


def put(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    here = config
    for name in sections:
        inner = here.get(name)
        if not isinstance(inner, dict):
            inner = here[name] = {}
        here = inner
    here[last] = value


def damaged(choose: random.Random, config: dict[str, Any]) -> bytes:
    """Return the configuration as JSON in which a few bytes are other ones."""
    text = bytearray(json.dumps(config, default=str, indent=choose.choice((None, 1))).encode())
    for _ in range(choose.randint(0, 3)):
        at = choose.randrange(len(text) + 1)
        way = choose.randrange(4)
        if way == 0:
            del text[at : at + choose.randint(1, 5)]
        elif way == 1:
            text[at:at] = choose.choice(
                (b"//", b"/*", b'"', b",", b"}", b"{", b"\xff", b"\0", b"#", b"[" * 3000, b"9" * 5000)
            )
        elif way == 2:
            text = text[:at]
        else:
            text[at : at + 1] = bytes([choose.randrange(256)])
    return bytes(text)


# -------------------------------------------------------------------------------------------------------- the check


class Verdict(NamedTuple):
    """Outcome of a configuration: accepted, refused, or a finding."""

    kind: str
    text: str = ""

    @property
    def finding(self) -> bool:
        return self.kind not in ("accepted", "trained", "refused")

    @property
    def signature(self) -> str:
        return f"{self.kind}: {re.sub(r'[0-9]+', '#', self.text)[:70]}"


def judge(source: Any, engine: bool = False) -> Verdict:
    """Read a configuration; a Verdict of it. ``engine``: also take a step with what is accepted."""
    with quiet(), limit():
        what = "read_config"
        try:
            config = read_config(source)
            what = "notes"
            for note in notes_of(config):
                if "\n" in note:
                    return Verdict("unclear", f"a note of several lines: {note!r}")
            what = "batch_sizes"
            sizes = batch_sizes(config, 1)
            what = "resolve_config"
            resolved = resolve_config(config, sizes)
            what = "resolved again"
            text = json.dumps(resolved)
            again = resolve_config(read_config(resolved), sizes)
            if json.dumps(again) != text:
                return Verdict("unstable", "the resolved configuration resolves to another one")
            what = "initialize"
            if engine and _affordable(resolved):
                _take_a_step(config)
                return Verdict("trained")
        except (ConfigError, AgreedError) as error:
            if what == "resolved again":
                return Verdict("unstable", f"the resolved configuration is refused: {error}")
            text = str(error)
            if "\n" in text or not 15 <= len(text) <= LONGEST * (1 + text.count("; ")):
                return Verdict("unclear", f"{what}: {len(text)} characters: {text[:300]!r}")
            return Verdict("refused", text)
        except OffloadError as error:  # a folder that this machine lacks, or a full disk: known when the engine is made
            return Verdict("refused", str(error)) if what == "initialize" else raw(what, error)
        except Exception as error:
            return raw(what, error)
    return Verdict("accepted")


def raw(what: str, error: Exception) -> Verdict:
    """Return the finding that an error is not one of triax's own, with the last place of triax in it."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).is_relative_to(ROOT)]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return Verdict("raw", f"{what}: {type(error).__name__} at {at}: {str(error)[:300]}")


def _affordable(resolved: dict[str, Any]) -> bool:
    """Return True if a step of the configuration is small."""
    count = resolved["gradient_accumulation_steps"]
    return bool(count <= 4 and resolved["train_micro_batch_size_per_gpu"] <= 16)


def _take_a_step(config: Any) -> None:
    torch.manual_seed(0)
    micro, count = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    sizes = batch_sizes(config, 1)
    micro, count = sizes.micro, sizes.accumulation
    model = triax.PipelineModule(
        [triax.LayerSpec(nn.Linear, 4, 4), triax.LayerSpec(nn.Linear, 4, 4)], loss_fn=mean_loss, grid=triax.Grid()
    )
    engine, *_ = triax.initialize(model=model, config=config)
    if engine.optimizer is not None:
        engine.train_batch(iter([(torch.ones(micro, 4), torch.zeros(micro, 4))] * count))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run without output, in a folder of its own."""
    logger = logging.getLogger("triax")
    level, here = logger.level, os.getcwd()
    logger.setLevel(logging.CRITICAL + 1)
    with tempfile.TemporaryDirectory(prefix="triax-config-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            os.chdir(here)
            logger.setLevel(level)


@contextlib.contextmanager
def limit(seconds: int = LIMIT) -> Iterator[None]:
    """Raise an error if the context takes longer than this."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds := math.ceil(seconds * slowdown()))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge_file(data: bytes) -> Verdict:
    """Read a configuration from a file with these bytes."""
    with tempfile.TemporaryDirectory(prefix="triax-config-") as folder:
        file = Path(folder) / "ds_config.json"
        file.write_bytes(data)
        return judge(str(file))


# ---------------------------------------------------------------------------------------------------------- program


def run(seconds: float, seed: int, cases: int | None = None) -> tuple[Counter[str], list[str]]:
    """Draw and judge configurations until the time is over; the counts by outcome, and the findings."""
    counts: Counter[str] = Counter()
    findings: dict[str, str] = {}
    start, number = time.monotonic(), 0
    while (cases is None or number < cases) and time.monotonic() - start < seconds:
        choose = random.Random(f"{seed}/{number}")
        number += 1
        config = draw(choose)
        if number % 5 == 0:
            data = damaged(choose, config)
            verdict = judge_file(data)
            again = f"a file of the bytes {data!r}"
        else:
            engine = number % 4 == 0
            verdict = judge(config, engine)
            again = ""
        counts[verdict.kind] += 1
        if not verdict.finding or verdict.signature in findings:
            continue
        if not again:
            config = shrink(config, {}, partial(_again, verdict.signature, engine), tries=150)
            again = f"python tests/laws/fuzz_config.py --case '{_python(config)}'"
        findings[verdict.signature] = f"{verdict.kind.upper()}: {verdict.text}\n  {again[:1500]}"
        print(ascii(findings[verdict.signature]).strip("'\"").replace("\\n", "\n"), flush=True)
    spent = time.monotonic() - start
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"fuzz_config: {number} configurations in {spent:.0f} s (seed {seed}): {counted}")
    return counts, [*findings.values()]


def _again(signature: str, engine: bool, config: dict[str, Any]) -> bool:
    return judge(config, engine).signature == signature


def _python(config: dict[str, Any]) -> str:
    """Return a configuration as JSON if it is one, else as Python."""
    try:
        text = json.dumps(config)
        return text if json.loads(text) == config or "NaN" in text else repr(config)
    except (TypeError, ValueError):
        return repr(config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--case", help="one configuration, as JSON")
    options = parser.parse_args()
    if options.case:
        try:
            case = json.loads(options.case)
        except ValueError:
            case = ast.literal_eval(options.case)
        verdict = judge(case, engine=True)
        print(verdict.kind, verdict.text)
        return int(verdict.finding)
    _, findings = run(options.seconds, options.seed, options.cases)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
