"""Faults in the middle of runs: nothing committed is lost, every damage is told, every rank ends with a named cause.

    python tests/laws/faults.py --seconds 600 --seed 1
    python tests/laws/faults.py --case '{"grid": [1, 2, 1], "lives": [{"kind": "kill", "step": 3}]}'

A case is one run that lives several times in one folder of checkpoints, on a grid and ZeRO stage of its own each time.
A life ends by a fault: a rank is killed (at a moment, or at one of a save's system calls), stopped, exits, raises or
ends its loop early; the disk is full; the clock goes back; the run is started twice; a file is damaged. After each life
every checkpoint in the folder is whole, none that was committed is missing, and the next life goes on from the newest.
At the end the run has the losses of one process without faults, to 1e-10.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch
from torch import nn
from torch.utils.data import TensorDataset

import triax
from triax.base.errors import AgreedError, CheckpointError, CorruptError
from triax.checkpoint.format.folder import latest, tags, verify
from triax.checkpoint.format.index import read_index
from triax.testing import pool
from triax.testing.pool import RankFailure, run_ranks

from support.compositions import describe
from support.failing_disk import disturbed
from support.shrink import shrink
from support.toys import mean_loss

Case = dict[str, Any]
WIDTH, BATCH, TIMEOUT = 6, 4, 4
DEFAULT: Case = {"lives": [], "steps": 8, "every": 1, "keep": 3, "async": False, "seed": 0}
LIFE: Case = {"kind": "none", "grid": [1, 1, 1], "stage": 0, "schedule": "1f1b", "victim": 0, "step": 2, "at": 0.0}
ENDS = ("kill", "kill_in_save", "stop", "exit", "raise", "data", "leave", "interrupt")
GRIDS = ([1, 2, 1], [2, 1, 1], [1, 2, 1], [2, 1, 1], [1, 1, 2], [2, 2, 1], [1, 3, 1], [1, 1, 1])
DAMAGES = ("flip", "truncate", "remove", "extend", "zero", "swap", "empty", "latest")


# ---------------------------------------------------------------------------------------------------------- one life


class Layer(nn.Module):
    """A linear layer that raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.raises = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ZeroDivisionError("the user's own error")
        y: torch.Tensor = x + torch.tanh(self.inner(x))
        return y


def dataset() -> TensorDataset:
    x, y = torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(x, y)


def engine_of(life: Case, **checkpoint: Any) -> Any:
    """Return an engine over four layers, on the life's grid."""
    pipe, data, tensor = life["grid"]
    model = triax.PipelineModule(
        [triax.LayerSpec(Layer) for _ in range(4)],
        grid=triax.Grid(pipe, data, tensor, timeout=TIMEOUT),
        loss_fn=mean_loss,
        dtype=torch.float64,
        seed=life.get("weights", 0),
    )
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": life["stage"]},
        "pipeline": {"schedule": life["schedule"]},
        "seed": 5,
        "checkpoint": checkpoint,
    }
    return triax.initialize(model=model, config=config, training_data=dataset())[0]


def live(life: Case, case: Case, folder: str) -> tuple[int, list[float], list[str]]:
    """Train on this rank until the fault, or to the end; the step it began at, its losses, and what it refused."""
    rank = int(os.environ.get("RANK", 0))
    with _words_in(Path(folder) / f"rank-{rank}.log"):
        section = {"dir": f"{folder}/saved", "every": case["every"], "keep": case["keep"], "resume": "auto"}
        engine = engine_of(life, **section, **{"async": case["async"]})
        began = engine.global_steps
        losses: list[float] = []
        said: list[str] = []
        mine = rank == life["victim"] % math.prod(life["grid"])
        while engine.global_steps < case["steps"]:
            armed = mine and engine.global_steps == life["step"]
            if armed and life["kind"] == "leave":
                return began, losses, said
            with _fault(life, engine) if armed else contextlib.nullcontext():
                losses.append(engine.train_batch(_broken() if armed and life["kind"] == "data" else None).item())
            _note(folder, rank, engine, case)
        said.append(str(engine.wait_for_checkpoint()))
        return began, losses, said


def _note(folder: str, rank: int, engine: Any, case: Case) -> None:
    """Write down, outside of the folder of checkpoints, that a step's checkpoint was committed."""
    step = engine.global_steps
    if rank == 0 and not case["async"] and (Path(folder) / "saved" / f"global_step{step}" / "index.json").exists():
        with open(f"{folder}/committed", "a") as file:
            file.write(f"{step}\n")


def _broken() -> Iterator[Any]:
    raise OSError(errno.EIO, "the data's disk fails")
    yield


@contextlib.contextmanager
def _words_in(path: Path) -> Iterator[None]:
    """Send what this process prints to a file."""
    kept = os.dup(2)
    with path.open("a") as file:
        os.dup2(file.fileno(), 2)
        handler = logging.StreamHandler(file)
        logging.getLogger("triax").addHandler(handler)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            logging.getLogger("triax").removeHandler(handler)


@contextlib.contextmanager
def _fault(life: Case, engine: Any) -> Iterator[None]:
    """Let the fault happen in this step."""
    kind, at = life["kind"], life["at"]
    if kind in ("kill", "stop", "exit", "interrupt"):
        act: dict[str, Callable[[], object]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "exit": lambda: os._exit(life.get("code", 3)),
            "interrupt": lambda: os.kill(os.getpid(), signal.SIGUSR2),
        }
        if kind == "interrupt":
            signal.signal(signal.SIGUSR2, _interrupt)
        if at > 0:
            timer = threading.Timer(at, act[kind])
            timer.daemon = True
            timer.start()
        else:
            act[kind]()
        yield
        if at > 0:
            timer.join()
            time.sleep(0.05)  # the signal comes now, if it did not before
    elif kind == "raise":
        for module in engine.module.modules():
            if isinstance(module, Layer):
                module.raises = True
        yield
    elif kind == "kill_in_save":
        with disturbed(int(at), lambda: os.kill(os.getpid(), signal.SIGKILL)):
            yield
            engine.wait_for_checkpoint()
    elif kind == "full":
        with disturbed(int(at), _no_room):
            yield
            engine.wait_for_checkpoint()
    elif kind == "small":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(at), before[1]))
        try:
            yield
            engine.wait_for_checkpoint()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    elif kind == "clock":
        plain = time.time
        time.time = lambda: plain() - 1e6 * (1 + at)
        yield
    else:
        yield


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "it")


def live_twice(life: Case, case: Case, folder: str) -> tuple[int, list[float], list[str]]:
    """Train on this rank alone, at the same time and in the same folder as the other rank; each draws other weights."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    with _words_in(Path(folder) / f"rank-{rank}.log"):
        try:
            engine = engine_of(
                {**life, "grid": [1, 1, 1], "weights": 100 * rank},
                dir=f"{folder}/saved",
                every=1,
                keep=case["keep"],
                on_failure="stop",
                **{"async": case["async"]},
            )
            losses = []
            for _ in range(case["steps"]):
                losses.append(engine.train_batch().item())
                time.sleep(0.002 * life["at"])
            engine.wait_for_checkpoint()
            return 0, losses, []
        except Exception as error:
            return 0, [], [json.dumps(describe(error))]


# --------------------------------------------------------------------------------------------------------- the checks


class Verdict(NamedTuple):
    """Outcome of a case."""

    kind: str
    text: str = ""

    @property
    def finding(self) -> bool:
        return self.kind != "survived"

    @property
    def signature(self) -> str:
        return f"{self.kind}: {re.sub(r'[0-9.]+', '#', self.text)[:60]}"


class Problem(Exception):
    """A broken invariant."""


@cache
def losses_of(steps: int, weights: int = 0) -> list[float]:
    """Return the losses of one process without faults."""
    engine = engine_of({**LIFE, "weights": weights})
    return [engine.train_batch().item() for _ in range(steps)]


def judge(case: Case, counts: Counter[str] | None = None) -> Verdict:
    """Let a run live through its faults; ``counts`` counts the faults by kind."""
    case = {**DEFAULT, **case}
    counts = Counter() if counts is None else counts
    with tempfile.TemporaryDirectory(prefix="triax-faults-") as folder:
        (Path(folder) / "saved").mkdir()
        number, life = 0, dict(LIFE)
        try:
            while number < len(case["lives"]):
                life = {**LIFE, **case["lives"][number]}
                counts[life["kind"]] += 1
                if life["kind"] == "damage":
                    _damage(life, folder, case)
                elif life["kind"] == "twice":
                    return _twice(life, case, folder)
                else:
                    _one_life(life, case, folder)
                _check_folder(folder, case)
                number += 1
            life = dict(LIFE)
            _one_life(life, case, folder)
        except Problem as problem:
            return Verdict(life["kind"], f"life {number} ({life['kind']}): {problem}")
    return Verdict("survived")


def _one_life(life: Case, case: Case, folder: str) -> None:
    saved = Path(folder) / "saved"
    newest = _newest(saved)
    for log in Path(folder).glob("rank-*.log"):
        log.unlink()
    began = time.monotonic()
    try:
        results = run_ranks(math.prod(life["grid"]), live, life, case, folder, timeout=60)
    except RankFailure as failure:
        _check_ends(life, case, failure, folder, time.monotonic() - began)
        return
    for start, losses, _ in results:
        if start != newest:
            raise Problem(f"it went on from step {start}, and the newest checkpoint was of step {newest}")
        wanted = losses_of(case["steps"])[start:]
        for step, (loss, want) in enumerate(zip(losses, wanted, strict=False)):
            if not math.isclose(loss, want, rel_tol=1e-10):
                raise Problem(f"loss {loss!r} of step {start + step}, and {want!r} without faults")
        if life["kind"] != "leave" and len(losses) < len(wanted):
            raise Problem(f"a rank ended after {len(losses)} of {len(wanted)} steps")


def _check_ends(life: Case, case: Case, failure: RankFailure, folder: str, seconds: float) -> None:
    """Check how each rank ended: the victim by its fault, the others with a message that names the victim."""
    victim = life["victim"] % math.prod(life["grid"])
    if life["kind"] not in ENDS:
        raise Problem(f"the run ended: {failure.first.summary[:400]}")
    for report in failure.reports:
        log = Path(folder) / f"rank-{report.rank}.log"
        words = report.summary + report.text + (log.read_text() if log.exists() else "")
        if report.rank == victim:
            ok = ok_kind(life)
            # One that left its loop has nothing more to do; the hang watch ends it only if the others still wait.
            left = report.kind in ("returned", "died") and life["kind"] == "leave"
            if report.kind != ok and not left and not (ok == "died" and report.kind == "returned"):
                raise Problem(f"the victim, rank {victim}, {report.kind}, not {ok}: {report.summary[:300]}")
            continue
        if report.kind == "stuck":
            raise Problem(f"rank {report.rank} still ran {seconds:.0f} s after the fault: {report.text[-400:]}")
        if report.kind == "returned" and life["kind"] not in ("leave",):
            continue  # the fault came after its last step
        # Of a process that ends between two calls, others see closed connections: only a launcher knows whose.
        died = (ok_kind(life) == "died" or life["kind"] == "interrupt") and _CLOSED.search(words)
        if report.kind != "returned" and not died and not re.search(rf"rank {victim}\b", words):
            raise Problem(f"rank {report.rank} ended without naming rank {victim}: {report.summary[:500]}")


_CLOSED = re.compile(r"closed by peer|reset by peer|Broken pipe")


def ok_kind(life: Case) -> str:
    """Return how the victim of a fault must end."""
    ends = {"kill": "died", "kill_in_save": "died", "exit": "died", "stop": "stuck"}
    return ends.get(life["kind"], "raised")


def _newest(saved: Path) -> int:
    found = [int(tag.removeprefix("global_step")) for tag in tags(saved)]
    return max(found, default=0)


def _check_folder(folder: str, case: Case) -> None:
    """Check that every checkpoint is whole, and that none that was committed is lost."""
    saved = Path(folder) / "saved"
    for tag in tags(saved):
        if problems := [*verify(saved / tag, read_index(saved / tag))]:
            raise Problem(f"{tag} is damaged: {problems[0]}")
    noted = Path(folder) / "committed"
    committed = [int(line) for line in noted.read_text().split()] if noted.exists() else []
    found = _newest(saved)
    if committed and found < max(committed):
        raise Problem(f"step {max(committed)} was committed, and the newest checkpoint is of step {found}")
    if found and (named := latest(saved)) not in tags(saved):
        raise Problem(f"latest names {named!r}, and there are {tags(saved)}")
    if len(tags(saved)) > case["keep"] + 1:
        raise Problem(f"{len(tags(saved))} checkpoints are kept, and {case['keep']} were asked for")


def _damage(life: Case, folder: str, case: Case) -> None:
    """Damage a copy of the folder; verify, load and resume must tell or pass over it."""
    saved = Path(folder) / "saved"
    if not tags(saved):
        return
    with tempfile.TemporaryDirectory(prefix="triax-faults-") as place:
        copy = Path(place) / "saved"
        shutil.copytree(saved, copy)
        choose = random.Random(life["at"])
        tag = choose.choice(tags(copy))
        way = life.get("way", "flip")
        what = _harm(copy, tag, way, choose)
        if what is None:
            return
        if way != "latest" and not _told(copy / tag):
            raise Problem(f"verify says nothing of {what}")
        _loads_or_tells(copy, None if way == "latest" else tag, what, way == "latest", case)
        engine = _quietly(lambda: engine_of(LIFE, dir=str(copy), resume="auto"), f"resume: auto after {what}")
        step = engine.global_steps
        if way != "latest" and step == int(tag.removeprefix("global_step")):
            raise Problem(f"resume: auto took the damaged {tag}: {what}")
        wanted = losses_of(case["steps"] + 1)[step]
        if step < case["steps"] and not math.isclose(engine.train_batch().item(), wanted, rel_tol=1e-10):
            raise Problem(f"resume: auto after {what} went on with another loss")


def _harm(saved: Path, tag: str, way: str, choose: random.Random) -> str | None:
    """Damage one file; what was done."""
    files = sorted(path for path in (saved / tag).iterdir() if path.is_file())
    path = saved / "latest" if way == "latest" else choose.choice(files)
    if way == "latest" and not path.exists():
        return None
    data = bytearray(path.read_bytes())
    at = choose.randrange(len(data)) if data else 0
    if way == "remove":
        path.unlink()
        return f"{path.name} is removed"
    if way == "flip" or (way == "latest" and choose.random() < 0.5):
        data[at] ^= 1 << choose.randrange(8)
        path.write_bytes(data)
        return f"bit flipped in byte {at} of {path.name}: {bytes(data[:40])!r}"
    if way == "latest":
        text = choose.choice(
            ("", "../saved", "/", "global_step99", "\0", "é" * 50, str(saved / tag), "global_step1\n\nx")
        )
        path.write_text(text)
        return f"latest is {text!r}"
    if way == "truncate":
        path.write_bytes(data[:at])
    elif way == "extend":
        path.write_bytes(data + b"\0" * choose.randint(1, 9))
    elif way == "zero":
        length = min(choose.randint(1, 64), len(data) - at)
        if not any(data[at : at + length]):
            return None
        data[at : at + length] = bytes(length)
        path.write_bytes(data)
    elif way == "empty":
        path.write_bytes(b"")
    elif way == "swap":
        other = choose.choice([each for each in tags(saved) if each != tag] or [tag])
        if other == tag or not (saved / other / path.name).exists():
            return None
        if (saved / other / path.name).read_bytes() == bytes(data):
            return None
        if path.name == "index.json":
            return None
        path.write_bytes((saved / other / path.name).read_bytes())
    return f"{way} of {path.name} at byte {at}"


def _told(path: Path) -> bool:
    try:
        return bool([*verify(path, read_index(path))])
    except (CorruptError, OSError):
        return True


def _loads_or_tells(copy: Path, tag: str | None, what: str, may_load: bool, case: Case) -> None:
    engine = engine_of(LIFE)
    before = latest(copy) if not may_load else None
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("triax").addHandler(listener)
    try:
        loaded, _ = engine.load_checkpoint(copy, tag)
    except (CheckpointError, AgreedError, ValueError) as error:
        seen = describe(error)
        if not (isinstance(error, (CheckpointError, AgreedError)) or seen["clear"]):
            raise Problem(
                f"load_checkpoint after {what}: {seen['type']} at {seen['at']}: {seen['text'][:200]}"
            ) from None
        return
    except Exception as error:
        raise Problem(f"load_checkpoint after {what}: {type(error).__name__}: {str(error)[:300]}") from None
    finally:
        logging.getLogger("triax").removeHandler(listener)
    if not may_load:
        raise Problem(f"load_checkpoint loads {tag} (latest: {before}) in spite of {what}")
    newest = tags(copy)[-1]
    said = any(f"names {Path(loaded or '').name}, which is used, though {newest} is newer" in line for line in lines)
    if loaded is not None and Path(loaded).resolve() != (copy / newest).resolve() and not said:
        raise Problem(f"{what}: load_checkpoint loads {loaded}, the newest is {newest}, and the log does not say so")


def _quietly(call: Callable[[], Any], what: str) -> Any:
    logger = logging.getLogger("triax")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return call()
    except Exception as error:
        raise Problem(f"{what}: {type(error).__name__}: {str(error)[:300]}") from None
    finally:
        logger.setLevel(level)


def _twice(life: Case, case: Case, folder: str) -> Verdict:
    """Start the run twice at the same time: each goes on or is refused, and what is committed is of one of them."""
    try:
        results = run_ranks(2, live_twice, life, case, folder, timeout=60, init_group=False)
    except RankFailure as failure:
        return Verdict("twice", f"a run ended: {failure.first.summary[:300]}")
    refused = [json.loads(said[0]) for _, _, said in results if said]
    for error in refused:
        if not error["clear"] and error["type"] != "CheckpointError":
            return Verdict("twice", f"the second run ends raw: {error['type']} at {error['at']}: {error['text'][:200]}")
    if len(refused) == 2:
        return Verdict("twice", f"both runs are refused: {refused[0]['text'][:300]}")
    saved = Path(folder) / "saved"
    try:
        _check_folder(folder, {**case, "keep": 2 * case["keep"] + 1})
    except Problem as problem:
        return Verdict("twice", str(problem))
    engine = _quietly(lambda: engine_of(LIFE, dir=str(saved), resume="auto"), "resume: auto after two runs")
    step = engine.global_steps
    if not step:
        return Verdict("twice", f"{2 - len(refused)} of two runs went to the end, and there is no checkpoint")
    loss = engine.train_batch().item()
    if not any(math.isclose(loss, losses_of(step + 1, weights)[step], rel_tol=1e-10) for weights in (0, 100)):
        return Verdict("twice", f"the checkpoint of step {step} is of neither run: its next loss is {loss!r}")
    return Verdict("survived")


# ------------------------------------------------------------------------------------------------------------ program


def draw(choose: random.Random) -> Case:
    """Draw a run and its faults."""
    case: Case = {
        "steps": choose.randint(8, 12),
        "every": choose.choice((1, 1, 2)),
        "keep": choose.choice((2, 3)),
        "async": choose.random() < 0.3,
        "lives": [],
    }
    if choose.random() < 0.12:
        case["lives"] = [{"kind": "twice", "at": choose.random(), "stage": choose.randrange(2)}]
        return case
    step = 0
    for _ in range(choose.randint(3, 6)):
        kind = choose.choices((*ENDS, "full", "small", "clock", "none"), (10, 10, 1, 3, 2, 2, 1, 1, 5, 3, 4, 1))[0]
        grid = choose.choice(GRIDS)
        if math.prod(grid) == 1 and kind in ("stop", "leave"):
            kind = "kill"
        step = min(step + choose.randint(0, 2), case["steps"] - 2)
        life = {"kind": kind, "grid": grid, "stage": choose.randrange(4), "step": step, "victim": choose.randrange(4)}
        life["schedule"] = choose.choice(("1f1b", "gpipe", "zb-h1"))
        life["at"] = choose.choice((0, round(choose.uniform(0, 0.08), 4)))
        if kind in ("kill_in_save", "full"):
            life["at"] = choose.randrange(26)
        elif kind == "small":
            life["at"] = choose.choice((0, 100, 3000, 20000))
        elif kind == "exit":
            life["code"] = choose.choice((0, 1, 3))
        case["lives"].append(life)
        for _ in range(choose.randint(1, 4)):
            case["lives"].append({"kind": "damage", "way": choose.choice(DAMAGES), "at": choose.randrange(10**6)})
    return case


def run(seconds: float, seed: int, cases: int | None = None, shrinking: bool = True) -> tuple[Counter[str], list[str]]:
    """Draw and judge cases until the time is over; the faults by kind, and the findings."""
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    findings: dict[str, str] = {}
    start, number = time.monotonic(), 0
    pool.GRACE = 3.0 * TIMEOUT + 8  # others have to find out by themselves
    while (cases is None or number < cases) and time.monotonic() - start < seconds:
        case = draw(random.Random(f"{seed}/{number}"))
        number += 1
        verdict = judge(case, faults)
        outcomes["survived" if not verdict.finding else f"broken by {verdict.kind}"] += 1
        if not verdict.finding or verdict.signature in findings:
            continue
        if shrinking:
            case = shrink(case, DEFAULT, partial(_again, verdict.signature), tries=15)
        command = f"python tests/laws/faults.py --case '{json.dumps(case)}'"
        findings[verdict.signature] = f"BROKEN by {verdict.text}\n  {command}"
        print(findings[verdict.signature], flush=True)
    spent = time.monotonic() - start
    kills = sum(faults[kind] for kind in ("kill", "kill_in_save"))
    others = sum(faults.values()) - kills - faults["none"]
    listed = ", ".join(f"{count} {kind}" for kind, count in faults.most_common())
    print(f"faults: {number} runs, {kills} kills and {others} other faults in {spent:.0f} s (seed {seed}): {listed}")
    print("  " + (", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()) or "none"))
    return faults, [*findings.values()]


def _again(signature: str, case: Case) -> bool:
    return judge(case).signature == signature


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--case", help="one run, as JSON")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    if options.case:
        pool.GRACE = 3.0 * TIMEOUT + 8
        verdict = judge(json.loads(options.case))
        print(verdict.kind, verdict.text)
        return int(verdict.finding)
    _, findings = run(options.seconds, options.seed, options.cases, not options.no_shrink)
    return int(bool(findings))


if __name__ == "__main__":
    from laws import faults  # so that ranks find its functions under their module's name

    sys.exit(faults.main())
