"""Hostile training files: each is accepted and acts, or is refused by clear lines.

    python tests/laws/fuzz_train_files.py --seconds 60 --seed 1
    python tests/laws/fuzz_train_files.py --case 'model: {preset: bytes-tiny}' --ending yaml

Files are made from the recipes and from a file with most keys: keys are misspelt, moved, unknown or there twice; values
are of a wrong type, extreme, or contradict each other; folders are missing, tokens damaged; bytes are other ones; and
YAML has its traps. A finding is any error but a ConfigError in triax's own words, and a change that nothing notices:
the file is accepted, and is the file that it was.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import yaml

from triax.base.errors import AgreedError, ConfigError
from triax.models.config import LlamaConfig
from triax.models.huggingface.config import to_hf
from triax.options.base import hints_of
from triax.options.table import rows
from triax.train.file import read_training_file, short_forms
from triax.train.loop import train
from triax.train.older_keys import new_name
from triax.train.sections import TrainingFile
from triax.train.start import make_job

from laws.fuzz_config import LIMIT, LONGEST, STRANGE, Verdict, limit, put, quiet, raw, right_value
from support.paths import ROOT
from support.tokenized import folder

FIELDS = {path: SimpleNamespace(hint=hints_of(section)[found.name]) for path, section, found in rows(TrainingFile)}
SHORT = short_forms()
LONG = 120  # seconds for a file that is also trained: buckets of 3 elements, for instance, are slow
# Words of pydantic, Python and PyYAML that say nothing to the writer of a file.
RAW = re.compile(
    r"pydantic|validation error|Input should|Value error|Traceback|input_value|type=|<class|object at 0x|NoneType|"
    r"\bErrno\b|Field required|Extra inputs|expected <|could not determine a constructor|list\[|dict\[|literal\[|"
    r"datetime|unhashable|base 10|\(char "
)
WHOLE = """\
# most keys
name: one
runs: here
seed: 3
model: {preset: bytes-tiny, overrides: {num_hidden_layers: 1}}
tokenizer: bytes
data: {training: tokens, held_out: 0.2, packing: cut, document_mask: true, shuffle: true, threads: 0}
grid: {pipe: 1, data: 1, context: 1, tensor: 1, expert: 1, sequence_parallel: false}
schedule: {name: 1f1b}
training:
  steps: 2
  sequence: 16
  learning_rate: {peak: 1e-3, schedule: cosine, warmup_steps: 1, minimum: 0.1}
  spikes: {action: warn, loss: 6.0, norm: 10.0, window: 100, limit: 3}
evaluate: {every: 2, sequences: 4}
checkpoint: {every: 2, keep: 2, resume: auto, background: false}
sample: {prompt: a, tokens: 3, temperature: 0.7}
monitor: {trace: false}
export: {dtype: float32}
deepspeed: {steps_per_print: 5}
batch: {size: 4, microbatch: 2}
optimizer: {type: AdamW, betas: [0.9, 0.95], weight_decay: 0.1, decays: matrices}
zero: 1
precision: fp32
clip: 1.0
recompute: none
"""
SMALL = """\
model: {folder: llama, weights: false}
data: {tokens: 0.7, other: 0.3}
training:
  tokens: 1K
  sequence: 16
  time_limit: 10m
  learning_rate: 1e-3
  spikes: skip
checkpoint: false
export: false
batch: {tokens: 64}
"""
SMALL = SMALL.replace("data: {tokens", "data: {training: {tokens").replace("0.3}", "0.3}}")

# Each is (text to find in WHOLE, text to put there), and must be refused.
REFUSED = [
    ("steps: 2\n", "steps: 2\n  steps: 3\n"),
    ("steps: 2\n", "\tsteps: 2\n"),
    ("steps: 2\n", 'steps: "2"\n'),
    ("steps: 2\n", "steps: 2.5\n"),
    ("steps: 2\n", "steps: 1:30\n"),
    ("steps: 2\n", "steps: 010\n"),
    ("steps: 2\n", "steps: 1:30:00\n"),
    ("steps: 2\n", "steps: on\n"),
    ("steps: 2\n", "steps: [2]\n"),
    ("steps: 2\n", "steps: 2024-01-01\n"),
    ("steps: 2\n", "steps: -2\n"),
    ("steps: 2\n", "steps: 0\n"),
    ("steps: 2\n", "steps: .inf\n"),
    ("steps: 2\n", "steps: ~\n  tokens: .nan\n"),
    ("steps: 2\n", "steps: 2\n  tokens: 1B\n"),
    ("steps: 2\n", "steps: 2\n  stpes: 3\n"),
    ("steps: 2\n", "steps: 2\n  on: 3\n"),
    ("steps: 2\n", "steps: 2\n  ? [a, b]\n  : 3\n"),
    ("steps: 2\n", "steps: 2\n  ? {a: b}\n  : 3\n"),
    ("steps: 2\n", "steps: *there\n"),
    ("steps: 2\n", "steps: &a [*a]\n"),
    ("steps: 2\n", "<<: 3\n  steps: 2\n"),
    ("steps: 2\n", "<<: {stepz: 3}\n  steps: 2\n"),
    ("steps: 2\n", "steps: !!python/object/apply:os.system [ls]\n"),
    ("steps: 2\n", "steps: !!binary aGVsbG8=\n"),
    ("steps: 2\n", "steps: !!int abc\n"),
    ("steps: 2\n", "steps: !mine 2\n"),
    ("steps: 2\n", "steps: {2\n"),
    ("steps: 2\n", "steps: 'a\n"),
    ("steps: 2\n", "steps: 2 batch: 3\n"),
    ("steps: 2\n", "steps: 2\n batch: 3\n"),
    ("steps: 2\n", "steps:2\n"),
    ("peak: 1e-3", 'peak: "1e-3"'),
    ("peak: 1e-3", "peak: 1e-3.0"),
    ("peak: 1e-3", "peak: 0,001"),
    ("peak: 1e-3", "peak: -1e-3"),
    ("peak: 1e-3", "peak: 1e400"),
    ("peak: 1e-3", "peak: true"),
    ("sequence_parallel: false", "sequence_parallel: 0"),
    ("sequence_parallel: false", "sequence_parallel: 'false'"),
    ("shuffle: true", "shuffle: y"),
    ("packing: cut", "packing: Cut"),
    ("preset: bytes-tiny", "preset: bytes-tny"),
    ("preset: bytes-tiny", "preset: bytes-tiny, folder: llama"),
    ("preset: bytes-tiny", "preset: null"),
    ("preset: bytes-tiny, overrides: {num_hidden_layers: 1}", "folder: nowhere"),
    ("preset: bytes-tiny, overrides: {num_hidden_layers: 1}", "folder: llama"),
    ("preset: bytes-tiny, overrides: {num_hidden_layers: 1}", "folder: broken"),
    ("overrides: {num_hidden_layers: 1}", "overrides: {num_hidden_layer: 1}"),
    ("overrides: {num_hidden_layers: 1}", "overrides: {num_hidden_layers: one}"),
    ("overrides: {num_hidden_layers: 1}", "overrides: {num_hidden_layers: -1}"),
    ("overrides: {num_hidden_layers: 1}", "overrides: {num_hidden_layers: 1.5}"),
    ("overrides: {num_hidden_layers: 1}", "overrides: {hidden_size: 7}"),
    ("overrides: {num_hidden_layers: 1}", "overrides: {vocab_size: 7}"),
    ("training: tokens,", "training: nowhere,"),
    ("training: tokens,", "training: llama,"),
    ("training: tokens,", "training: cut,"),
    ("training: tokens,", "training: changed,"),
    ("training: tokens,", "training: noindex,"),
    ("training: tokens,", "training: [],"),
    ("training: tokens,", "training: {},"),
    ("training: tokens,", "training: {tokens: 0},"),
    ("training: tokens,", "training: {tokens: -1},"),
    ("training: tokens,", "training: {tokens: many},"),
    ("training: tokens,", "training: '',"),
    ("training: tokens,", "training: 3,"),
    ("held_out: 0.2", "held_out: 1.5"),
    ("held_out: 0.2", "held_out: 20%"),
    ("held_out: 0.2", "validation: nowhere"),
    ("tokenizer: bytes", "tokenizer: nowhere"),
    ("tokenizer: bytes", "tokenizer: llama"),
    ("grid: {pipe: 1", "grid: {pipe: 30"),
    ("grid: {pipe: 1", "grid: {pipe: 0"),
    ("expert: 1", "expert: 2"),
    ("data: 1, ", "data: 3, "),
    ("data: 1, ", "data: many, "),
    ("name: 1f1b", "name: 1f2b"),
    ("name: 1f1b", "name: nowhere.json"),
    ("name: 1f1b", "name: 1f1b, chunks: 4"),
    ("name: 1f1b", "name: 1f1b, memory: 1"),
    ("size: 4", "size: 5"),
    ("size: 4", "size: 4, tokens: 64"),
    ("size: 4", "tokens: 63"),
    ("sequence: 16", "sequence: 100000"),
    ("precision: fp32", "precision: bfloat16"),
    ("type: AdamW", "type: AdmW"),
    ("weight_decay: 0.1", "weight_decy: 0.1"),
    ("weight_decay: 0.1", "weight_decay: heavy"),
    ("weight_decay: 0.1", "lr: 0.1"),
    ("schedule: cosine", "schedule: cosin"),
    ("schedule: cosine", "schedule: constant"),
    ("schedule: cosine", "schedule: cosine, decay_steps: 3"),
    ("warmup_steps: 1", "warmup_steps: 1, warmup_tokens: 1K"),
    ("clip: 1.0", "clip: -1.0"),
    ("recompute: none", "recompute: some"),
    ("zero: 1", "zero: 4"),
    ("action: warn", "action: wrn"),
    ("steps: 2\n", "steps: 2\n  time_limit: 90\n"),
    ("checkpoint: {every: 2, keep: 2, resume: auto, background: false}", "checkpoint: {every: 2, resume: required}"),
    ("resume: auto", "resume: s3:/bucket/run"),
    ("keep: 2,", "keep: 2, folder: 's3:/bucket/run',"),
    ("keep: 2,", "keep: 2, folder: 'nowhere://bucket/run',"),
    ("checkpoint: {every: 2, keep: 2, resume: auto, background: false}", "checkpoint: yes please"),
    ("dtype: float32", "dtype: float8"),
    ("steps_per_print: 5", "steps_per_prnt: 5"),
    ("steps_per_print: 5", "train_batch_size: 8"),
    ("steps_per_print: 5", "gradient_clipping: 3.0"),
    ("steps_per_print: 5", "zero_optimization: {stage: 2}"),
    ("deepspeed: {steps_per_print: 5}", "deepspeed: nowhere.json"),
    ("deepspeed: {steps_per_print: 5}", "deepspeed: 5"),
    ("name: one", "name: a/b"),
    ("name: one", "name: ..\n"),
    ("name: one", "name: 1"),
    ("seed: 3", "seed: -3"),
    ("runs: here", "runs: ''"),
    ("# most keys", "- a list"),
    ("# most keys", "\x00"),
    ("# most keys", "---\nname: two\n---"),
    (
        "# most keys",
        "a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b, *b, *b, *b, *b]",
    ),
    ("# most keys", "deep: " + "[" * 400 + "]" * 400),
    ("# most keys", "long: " + "9" * 6000),
    ("# most keys", "x" * 3000 + ": 1"),
    (WHOLE, ""),
    (WHOLE, "# nothing"),
    (WHOLE, "name"),
    (WHOLE, "null"),
    (WHOLE, "model: {preset: bytes-tiny}"),
]
# Each must be accepted, as another way to write the same file or as another run: (find, put, key, value).
ACCEPTED: list[tuple[str, str, str, Any]] = [
    ("steps: 2\n", "steps: 0x10\n", "training.steps", 16),
    ("steps: 2\n", "steps: 1_000\n", "training.steps", 1000),
    ("steps: 2\n", "tokens: 1_280\n", "training.tokens", 1280),
    ("steps: 2\n", "<<: {steps: 3}\n", "training.steps", 3),
    ("steps: 2\n", "<<: {steps: 3}\n  steps: 2\n", "training.steps", 2),  # as YAML has it: for defaults
    ("steps: 2\n", "steps: &n 4\n  # again\n", "training.steps", 4),
    ("peak: 1e-3", "peak: 1E-4", "training.learning_rate.peak", 1e-4),
    ("peak: 1e-3", "peak: +.5e-3", "training.learning_rate.peak", 5e-4),
    ("shuffle: true", "shuffle: off", "data.shuffle", False),
    ("shuffle: true", "shuffle: No", "data.shuffle", False),
    ("# most keys", "\ufeff", "training.steps", 2),
    ("\n", "\r\n", "training.steps", 2),
    ("clip: 1.0", "clip: 0", "clip", None),
    ("name: one", "name: 'on'", "name", "on"),
    ("tensor: 1", "tensor: 2", "grid.tensor", 2),
]


# ----------------------------------------------------------------------------------------------------------- files


@functools.cache
def _place() -> Path:
    """Make the folders that the files name: tokens, whole and damaged, and a model's folder."""
    root = Path(tempfile.mkdtemp(prefix="triax-files-"))
    for number, name in enumerate(("tokens", "other", "cut", "changed", "noindex")):
        folder(root, 60, number, name)
    for name in ("llama", "broken"):
        (root / name).mkdir()
    config = LlamaConfig.preset("llama-tiny")
    (root / "llama" / "config.json").write_text(json.dumps(to_hf(config) | {"vocab_size": 256}))
    (root / "broken" / "config.json").write_text("{")
    pieces = sorted((root / "cut").glob("*.safetensors"))
    pieces[0].write_bytes(pieces[0].read_bytes()[:-7])
    pieces = sorted(path for path in (root / "changed").glob("*.json"))
    pieces[0].write_text(pieces[0].read_text().replace("1", "2", 1))
    for path in (root / "noindex").glob("*.json"):
        path.unlink()
    return root


def bases() -> list[str]:
    """Return the files that are changed: two of this program's, and the recipes, on this program's folders."""
    found = [WHOLE, SMALL]
    for path in sorted((ROOT / "examples" / "recipes").glob("*.yaml")):
        values = yaml.safe_load(re.sub(r"(\d)e-", r"\1.0e-", path.read_text()))
        values["data"] |= {"training": "tokens"} | ({"validation": "other"} if "validation" in values["data"] else {})
        if "folder" in values["model"]:
            values["model"] |= {"folder": "llama", "weights": False}
        if "packing" in values["data"]:
            del values["data"]["packing"]
        values["tokenizer"] = "bytes"
        found.append(yaml.safe_dump(values, sort_keys=False))
    return found


def draw(choose: random.Random) -> tuple[str, str]:
    """Draw a hostile file: its text, and the one it was made from."""
    base = choose.choice(bases())
    values = yaml.safe_load(base)
    way = choose.random()
    if way < 0.15:
        return _damaged(choose, base), base
    if way < 0.25:
        lines = base.splitlines(keepends=True)
        one, other = choose.sample(range(len(lines)), 2)
        if choose.random() < 0.5:
            lines[one], lines[other] = lines[other], lines[one]
        else:
            lines.insert(one, lines[other])
        return "".join(lines), base
    changed = copy.deepcopy(values)
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        key = choose.choice([*FIELDS])
        kind = choose.random()
        if kind < 0.3:
            key = _misspelt(choose, key)
        value = right_value(choose, FIELDS[key]) if key in FIELDS and kind < 0.75 else _plain(choose)
        _put_short(changed, key, value)
    try:
        return yaml.safe_dump(changed, sort_keys=False), yaml.safe_dump(values, sort_keys=False)
    except yaml.YAMLError:
        return draw(choose)


def _plain(choose: random.Random) -> Any:
    """Return a value of any type that YAML has."""
    value = choose.choice(STRANGE)
    return list(value) if isinstance(value, tuple) else value


def _put_short(values: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at a dotted key; a plain value on the way, which stands for a section, becomes one."""
    here, parts = values, key.split(".")
    for number in range(1, len(parts)):
        outer = ".".join(parts[:number])
        inner = here.get(parts[number - 1])
        if outer in SHORT and inner is not None and not isinstance(inner, dict):
            here[parts[number - 1]] = {SHORT[outer]: inner}
        if not isinstance(here.get(parts[number - 1]), dict):
            here[parts[number - 1]] = {}
        here = here[parts[number - 1]]
    put(here, parts[-1], value)


def _misspelt(choose: random.Random, key: str) -> str:
    *outer, last = key.split(".")
    at = choose.randrange(len(last))
    way = choose.randrange(5)
    wrong = (
        last[:at] + last[at + 1 :],
        last[:at] + last[at] + last[at:],
        last.upper(),
        f"{last} ",
        last.replace("_", "-") if "_" in last else f"{last}s",
    )[way]
    if choose.random() < 0.3:
        outer = choose.choice([*FIELDS]).split(".")[:-1]
    return ".".join([*outer, wrong or "x"])


def _damaged(choose: random.Random, text: str) -> str:
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(len(text))
        way = choose.randrange(4)
        if way == 0:
            text = text[:at] + text[at + choose.randint(1, 5) :]
        elif way == 1:
            extra = (
                "\t",
                "\x00",
                "é",
                "&a ",
                "*a",
                "!!",
                "- ",
                ": ",
                "#",
                "{",
                "}",
                "[",
                "'",
                '"',
                "\n",
                "\r",
                "0",
                "|",
            )
            text = text[:at] + choose.choice(extra) + text[at:]
        elif way == 2:
            text = text[:at]
        else:
            text = text[:at] + chr(choose.randrange(32, 127)) + text[at + 1 :]
        if not text:
            break
    return text


# -------------------------------------------------------------------------------------------------------- the check


def judge(text: str | bytes, base: str | None = None, ending: str = "yaml", step: bool = False) -> Verdict:
    """Read a training file, resolve it, and maybe take a step.

    Args:
        text: the file.
        base: the file that it was made from, to see if the change acts.
        ending: ``yaml``, ``toml`` or ``json``.
        step: take a step if the run is small and of one process.
    """
    root, what = _place(), "reading"
    with quiet(), limit(LONG if step else LIMIT):
        for name in ("tokens", "other", "cut", "changed", "noindex", "llama", "broken"):
            Path(name).symlink_to(root / name)
        path = Path(f"run.{ending}")
        path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
        try:
            file, source = read_training_file(path)
            what = "resolving"
            try:
                job = make_job(file)
            except ConfigError as error:
                raise ConfigError(source.place(str(error))) from error
            if base is not None and (silent := _unnoticed(path, text, file, base)):
                return Verdict("silent", silent)
            what = "training"
            if step and _affordable(job):
                file, _ = read_training_file(path, ["training.time_limit=0.001s"])
                train(make_job(file))
                return Verdict("trained")
        except (ConfigError, AgreedError) as error:
            return _clear(what, str(error), path)
        except SystemExit as error:  # user_error has printed the message of a rank
            return Verdict("refused" if error.code == 2 else "raw", f"{what}: exit code {error.code}")
        except Exception as error:
            return raw(what, error)
    return Verdict("accepted")


def _clear(what: str, text: str, path: Path) -> Verdict:
    """Return a refusal if an error's lines are clear."""
    for line in text.splitlines() or [""]:
        if not 15 <= len(line) <= LONGEST * (4 if "; known are " in line else 1):
            return Verdict("unclear", f"{what}: a line of {len(line)} characters: {line[:300]!r}")
        if (raw := RAW.search(line)) is not None:
            return Verdict("unclear", f"{what}: {raw[0]!r} is no word of triax's: {line[:300]!r}")
        if what != "training" and not line.startswith(str(path)):
            return Verdict("unclear", f"{what}: a line does not name the file: {line[:300]!r}")
    return Verdict("refused", text)


def _unnoticed(path: Path, text: str | bytes, file: TrainingFile, base: str) -> str:
    """Return what was changed without an effect; empty if the file is another one, or says the same in other words."""
    path.write_text(base)
    try:
        before, _ = read_training_file(path)
    finally:
        path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    dump = file.plain()
    if dump != before.plain():
        return ""
    with contextlib.suppress(yaml.YAMLError, ValueError):
        for key, value in _leaves(yaml.safe_load(text), ()):
            held: Any = dump
            for part in new_name(".".join(key)).split("."):
                held = held.get(part, KeyError) if isinstance(held, dict) else KeyError
            if isinstance(held, dict) and not isinstance(value, dict) and ".".join(key) in SHORT:
                held = held[SHORT[".".join(key)]]
            if held is KeyError and (*key[:1],) != ("deepspeed",):
                return f"{'.'.join(key)} is {value!r}, and no key of the file that was read"
    return ""


def _leaves(values: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(values, dict) and values:
        for name, inner in values.items():
            yield from _leaves(inner, (*key, str(name)))
    elif key:
        yield key, values


def _affordable(job: Any) -> bool:
    """Return True if a step of the run is small."""
    batch = job.batch
    small = job.model.parameter_count < 300_000 and batch.train * job.sequence <= 4096
    wanted = 0 if job.file.sample is None else job.file.sample.tokens
    return bool(job.topology.world_size == 1 and small and batch.accumulation <= 16 and wanted < 200)


# ---------------------------------------------------------------------------------------------------------- program


def known(every: int = 1) -> Iterator[tuple[str, Verdict]]:
    """Judge the files of ``REFUSED`` and ``ACCEPTED``, or every so many of them.

    Yields what was changed, and the verdict of those that fail.
    """
    for find, change in REFUSED[::every]:
        assert find in WHOLE, find
        verdict = judge(WHOLE.replace(find, change, 1), step="resume: " in change)
        if verdict.kind != "refused":
            yield change[:80], verdict
    for find, change, key, value in ACCEPTED[::every]:
        text = WHOLE.replace(find, change) if find == "\n" else WHOLE.replace(find, change, 1)
        verdict = judge(text)
        if verdict.kind != "accepted":
            yield change, verdict
            continue
        with quiet():
            Path("run.yaml").write_bytes(text.encode())
            found: Any = read_training_file("run.yaml")[0].plain()
        for part in key.split("."):
            found = found[part]
        if found != value:
            yield change, Verdict("silent", f"{key} is {found!r}, and not {value!r}")


def run(seconds: float, seed: int, cases: int | None = None, step: int = 3) -> tuple[Counter[str], list[str]]:
    """Draw and judge files until the time is over, of which every ``step``-th trains: counts of outcomes, findings."""
    counts: Counter[str] = Counter()
    findings: dict[str, str] = {}
    start, number = time.monotonic(), 0
    while (cases is None or number < cases) and time.monotonic() - start < seconds:
        text, base = draw(random.Random(f"{seed}/{number}"))
        number += 1
        verdict = judge(text, base, step=number % step == 0)
        counts[verdict.kind] += 1
        if verdict.finding and verdict.signature not in findings:
            findings[verdict.signature] = f"{verdict.kind.upper()}: {verdict.text}\n{text[:3000]}"
            print(ascii(findings[verdict.signature]).strip("'\"").replace("\\n", "\n"), flush=True)
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    print(f"fuzz_train_files: {number} files in {time.monotonic() - start:.0f} s (seed {seed}): {counted}")
    return counts, [*findings.values()]


def close() -> None:
    """Remove the folders that the files name."""
    shutil.rmtree(_place(), ignore_errors=True)
    _place.cache_clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--case", help="the text of one file")
    parser.add_argument("--ending", default="yaml")
    options = parser.parse_args()
    try:
        if options.case:
            verdict = judge(options.case, ending=options.ending, step=True)
            print(verdict.kind, verdict.text)
            return int(verdict.finding)
        wrong = [f"{change!r}: {verdict}" for change, verdict in known()]
        print("\n".join(wrong) or "the known ones are as they must be")
        _, findings = run(options.seconds, options.seed, options.cases)
        return int(bool(findings or wrong))
    finally:
        close()


if __name__ == "__main__":
    sys.exit(main())
