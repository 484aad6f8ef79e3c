"""Prompts with answers as rows of tokens: data sets with TRL's columns, as training data of an engine.

| form | columns of a sample | rows of a sample |
|---|---|---|
| ``sft`` | ``messages``; or ``prompt`` and ``completion``; or ``text`` | the sample |
| ``pairs`` | ``chosen`` and ``rejected``; ``prompt``, or it is their common beginning | the better, the worse answer |
| ``unpaired`` | ``prompt``, ``completion`` and ``label`` (true: desirable) | the sample; the answer before it |
| ``scored`` | ``chosen`` and ``rejected``; there may be ``prompt`` and ``margin`` | the better, the worse answer |

The second row of an ``unpaired`` sample is its prompt with the answer of the sample before, for KTO's baseline. A
prompt or an answer is a text, or a list of messages for the tokenizer's chat template. The tokens of a row are those of
prompt and answer together, and the answer begins where they differ from the prompt's own tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ..base.errors import ConfigError, nearest
from .bad_document import BadDocument
from .chat import ChatTemplate
from .conversations import is_conversation, messages_of
from .held_out import NumberedSamples
from .packing import IGNORED
from .sources import UNITS, find_sources, records
from .token_file import Array
from .tokenizer import TextTokenizer, open_tokenizer

Form = Literal["sft", "pairs", "unpaired", "scored"]
COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("messages",), ("prompt", "completion"), ("text",)),
    "pairs": (("chosen", "rejected"),),
    "unpaired": (("prompt", "completion", "label"),),
    "scored": (("chosen", "rejected"),),
}


class AnswerRow(NamedTuple):
    """Tokens of a row (n,), int32, and for each 1 if it counts in the loss, else 0, uint8."""

    ids: Array
    counts: Array


class Answers(NumberedSamples):
    """Samples of prompts with answers; ``collate`` makes a microbatch of several.

    Args:
        paths: JSON lines, Parquet or Arrow files, or folders of them, such as ``datasets`` saves.
        form: the form of the samples.
        tokenizer: name for ``open_tokenizer``; a folder with a chat template for messages.
        length: the most tokens of a row. Longer rows are cut there, and a sample is dropped if the cut removes a whole
            answer. Rows of ``scored`` are not cut: a pair with a longer one is dropped.
        multiple: number that divides T, for axes that shard the sequence; it divides ``length``.

    Attributes:
        rows: the rows of all samples, one sample after the other.
        beside: for each sample true or false of its answer, the margin of its pair, or its images.
        width: rows of a sample.
        whole: True if rows are not cut: every token is an input. Else the last one is a label alone.
        cut, left_out: number of rows that were cut, and of samples that were left out.
        length: T, the number of tokens of each padded row.
        reference: log-probability of each sample's rows by the reference model, float64 (N, width); None: not known.

    Raises:
        ConfigError: a file cannot be read, a sample does not have the form, or no sample is left.
    """

    def __init__(
        self,
        paths: str | Path | Iterable[str | Path],
        form: Form,
        tokenizer: str | Path,
        length: int,
        multiple: int = 1,
    ) -> None:
        if form not in get_args(Form):
            raise ConfigError(f"form is {form!r}: {nearest(form, get_args(Form))}.")
        given = [paths] if isinstance(paths, (str, Path)) else [*paths]
        reader = self._reader(form, tokenizer)
        samples, places = list[tuple[Any, ...]](), list[str]()
        for source in find_sources(given)[0]:
            reader.folder = Path(source.name).parent
            for line, value in records(source):
                places.append(f"{source.name}, {UNITS[source.format]} {line}")
                with at_place(places[-1]):
                    samples.append(reader.parse(value))
        self.form, self.width = form, 1 if form == "sft" else 2
        self.reference: Tensor | None = None
        made = []
        for number, place in enumerate(places):
            with at_place(place):
                made.append(reader.rows(samples, number))
        self.whole = whole = reader.whole
        self.cut = 0 if whole else sum(len(row.ids) > length + 1 for sample in made for row in sample)
        kept = [
            index
            for index, sample in enumerate(made)
            if all(0 < len(row.ids) <= length if whole else row.counts[1 : length + 1].any() for row in sample)
        ]
        self.left_out = len(made) - len(kept)
        if not kept:
            raise ConfigError(
                f"there is no sample in {', '.join(map(str, given))} whose prompt is shorter than {length} tokens"
            )
        self.rows = [AnswerRow(*(part[: length + 1] for part in row)) for index in kept for row in made[index]]
        self.beside = [samples[index][-1] for index in kept]
        if form == "scored" and len({judgment is None for judgment in self.beside}) > 1:
            place = places[kept[[judgment is None for judgment in self.beside].index(True)]]
            raise ConfigError(f"{place}: there is no 'margin', but other pairs have one: give each pair one, or none.")
        longest = max(len(row.ids) for row in self.rows) - (not whole)
        self.length = min(-(-longest // multiple) * multiple, length)
        self.numbers = range(len(kept))

    def _reader(self, form: Form, tokenizer: str | Path) -> SampleReader:
        """Return the reader of the samples."""
        return SampleReader(form, tokenizer)

    @property
    def checksum(self) -> str:
        """Hash of all rows."""
        digest = hashlib.sha256(f"{self.form} {len(self.rows)}".encode())
        for row in self.rows:
            digest.update(row.ids.tobytes() + b"|" + row.counts.tobytes())
        return digest.hexdigest()

    def collate(self, numbers: Sequence[int]) -> tuple[Tensor, Any]:
        """Return a microbatch (inputs, labels) of samples.

        Inputs are ids, int64 (B, T); of ``pairs`` (2 P, T), the better answers, then the worse. Labels of ``sft`` are
        int64 (B, T), of the others a dict with these as ``labels`` and, where they are known, ``reference``; of
        ``unpaired`` also with ``desirable``, bool (B,), and ``sample``, the number of each sample. Of ``scored`` the
        inputs are as of ``pairs``, and labels a dict with ``lengths``, int64 (2 P,), and, if the pairs have margins,
        ``margin``, float64 (P,).
        """
        ranks = range(self.width if self.form in ("pairs", "scored") else 1)
        places = [number * self.width + rank for rank in ranks for number in numbers]
        inputs, labels = self._padded(places)
        if self.form == "sft":
            return inputs, labels
        if self.form == "scored":
            ends: dict[str, Tensor] = {"lengths": torch.tensor([len(self.rows[row].ids) for row in places])}
            margins = [self.beside[number] for number in numbers]
            return inputs, ends if None in margins else ends | {"margin": torch.tensor(margins, dtype=torch.float64)}
        targets: dict[str, Tensor] = {"labels": labels} | self._reference(numbers, ranks)
        if self.form == "unpaired":
            good = torch.tensor([bool(self.beside[number]) for number in numbers])
            targets |= {"desirable": good, "sample": torch.tensor(list(numbers))}
        return inputs, targets

    def mismatched(self, numbers: Sequence[int]) -> tuple[Tensor, Any]:
        """Return a microbatch of ``unpaired`` samples' second rows: the answer of another sample at the prompt."""
        inputs, labels = self._padded([number * self.width + 1 for number in numbers])
        return inputs, {"labels": labels} | self._reference(numbers, range(1, 2))

    def _reference(self, numbers: Sequence[int], ranks: range) -> dict[str, Tensor]:
        if self.reference is None:
            return {}
        return {"reference": self.reference[list(numbers)][:, list(ranks)].T.flatten()}

    def _padded(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ids and labels, int64 (B, T) each, of rows."""
        ids = np.zeros((len(places), self.length + 1), np.int64)
        counts = np.zeros((len(places), self.length + 1), bool)
        for at, row_number in enumerate(places):
            row = self.rows[row_number]
            ids[at, : len(row.ids)], counts[at, : len(row.ids)] = row
        labels = np.where(counts, ids, IGNORED)
        return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(labels[:, 1:].copy())


class SampleReader:
    """Reader of samples of a form, and their rows.

    Attributes:
        folder: folder of the file that is read.
        whole: as for ``Answers``.
    """

    folder: Path

    def __init__(self, form: Form, tokenizer: str | Path) -> None:
        self.whole = form == "scored"
        self._form, self._name = form, tokenizer
        self._text: TextTokenizer = open_tokenizer(tokenizer)
        self._chat: ChatTemplate | None = None

    def parse(self, value: Any) -> tuple[Any, ...]:
        """Return (prompt, answers ..., label) of a sample; the prompt is None for a whole text or conversation.

        The label of ``scored`` is the margin, or None.

        Raises:
            BadDocument: columns are missing, or are of another type.
        """
        if isinstance(value, BadDocument):
            raise value
        forms = COLUMNS[self._form]
        names = next((form for form in forms if all(value.get(name) is not None for name in form)), None)
        if names is None and self._form == "sft" and is_conversation(value):
            return None, messages_of(value), True
        if names is None:
            wanted = ", or ".join(" and ".join(map(repr, form)) for form in forms)
            raise BadDocument(f"the columns are {', '.join(map(repr, value))}, but {wanted} are needed")
        if self._form == "pairs":
            answers = _pair(value.get("prompt"), value["chosen"], value["rejected"])
            return *answers, True
        if self._form == "scored":
            return _scored(value)
        if names == ("messages",) or names == ("text",):
            return None, kind_of(names[0], value[names[0]], list if names[0] == "messages" else str), True
        label = value.get("label", True)
        if not isinstance(label, (bool, int)):
            raise BadDocument(f"'label' is {label!r}, but true or false is needed")
        prompt, answer = kind_of("prompt", value["prompt"], str, list), value["completion"]
        return prompt, kind_of("completion", answer, type(prompt)), bool(label)

    def rows(self, samples: Sequence[tuple[Any, ...]], number: int) -> list[AnswerRow]:
        """Return the rows of a sample.

        Raises:
            BadDocument: the chat template refuses its messages.
        """
        prompt, *answers, _ = samples[number]
        if self._form == "scored":
            rows = [self._tokens(answer if prompt is None else prompt + answer) for answer in answers]
            return [AnswerRow(ids, np.ones(len(ids), np.uint8)) for ids in rows]
        if self._form == "unpaired":  # its own answer, and the answer of the sample before
            answers.append(samples[number - 1][1])
        return self._of_one(prompt, answers)

    def _of_one(self, prompt: Any, answers: Sequence[Any]) -> list[AnswerRow]:
        """Return the rows of a prompt with each of several answers."""
        wholes = [self._whole(prompt, answer) for answer in answers]
        if prompt is None:
            return wholes
        start = self._tokens(prompt, is_prompt=True)
        same = min(_common(start, row.ids) for row in wholes)
        for row in wholes:
            row.counts[:same] = 0
        return wholes

    def _whole(self, prompt: Any, answer: Any) -> AnswerRow:
        """Return the row of prompt and answer, all of whose tokens count unless it is a conversation alone."""
        if prompt is None and isinstance(answer, list):
            encoded = self._template.encode(answer)
            if isinstance(encoded, BadDocument):
                raise encoded
            return AnswerRow(encoded[0].astype(np.int32), encoded[1])
        ids = self._tokens(answer if prompt is None else prompt + answer)
        return AnswerRow(ids, np.ones(len(ids), np.uint8))

    def _tokens(self, value: Any, is_prompt: bool = False) -> Array:
        """Return the tokens of a text, or of messages; of a text that is no prompt with the token that ends it."""
        if isinstance(value, list):
            return np.asarray(self._template.tokens(value, is_prompt), np.int32)
        (ids,) = self._text.encode([value])
        end = self._text.facts.end
        return ids[: len(ids) - 1 if is_prompt and end is not None else None].astype(np.int32)

    @property
    def _template(self) -> ChatTemplate:
        self._chat = self._chat or ChatTemplate(self._name)
        return self._chat


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Turn a ``BadDocument`` into a ConfigError that begins with the place."""
    try:
        yield
    except BadDocument as error:
        raise ConfigError(f"{place}: {error}.") from error


def _pair(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return prompt, better and worse answer; without a prompt it is the common beginning of the two."""
    kinds = (str, list) if prompt is None else (type(kind_of("prompt", prompt, str, list)),)
    chosen = kind_of("chosen", chosen, *kinds)
    rejected = kind_of("rejected", rejected, type(chosen))
    if prompt is not None:
        return prompt, chosen, rejected
    same = _common(chosen, rejected)
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # a space belongs to the word behind it, as tokenizers have it
    if same in (0, len(chosen), len(rejected)):
        raise BadDocument("'chosen' and 'rejected' have no common beginning with two ends: give 'prompt'")
    return chosen[:same], chosen[same:], rejected[same:]


def _scored(value: Any) -> tuple[Any, Any, Any, float | None]:
    """Return prompt, better and worse answer, and margin of a pair; without a prompt the answers are whole."""
    prompt, margin = value.get("prompt"), value.get("margin")
    kinds = (str, list) if prompt is None else (type(kind_of("prompt", prompt, str, list)),)
    chosen = kind_of("chosen", value["chosen"], *kinds)
    rejected = kind_of("rejected", value["rejected"], type(chosen))
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, (int, float))):
        raise BadDocument(f"'margin' is {margin!r}, but a number is needed")
    return prompt, chosen, rejected, margin


def kind_of(name: str, value: Any, *kinds: type) -> Any:
    """Return a value of one of the types, which is not empty; messages must have a role and a content."""
    words: dict[type, str] = {str: "a text", list: "a list of messages"}
    if not isinstance(value, kinds) or not value:
        shown = "empty" if isinstance(value, kinds) else f"a {type(value).__name__}"
        raise BadDocument(f"{name!r} is {shown}, but {' or '.join(words[kind] for kind in kinds)} is needed")
    for number, message in enumerate(value if isinstance(value, list) else (), 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadDocument(f"message {number} of {name!r} is not an object with a 'role' and a 'content'")
    return value


def _common(first: Any, second: Any) -> int:
    """Return the number of equal elements at the beginning of two sequences."""
    pairs = zip(first, second)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
