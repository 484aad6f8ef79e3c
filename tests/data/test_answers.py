"""Prompts with answers: tokens and labels equal those of TRL's trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from triax.base.errors import ConfigError
from triax.data import Answers, train_tokenizer
from triax.data.sources import Reading, find_sources

from support.tokenized import write_json_lines
from support.toy_answers import quiet

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [turn("user", "why is the sky blue?")]
PAIRS: list[dict[str, Any]] = [
    {"prompt": "why is the sky", "chosen": " blue? because", "rejected": " bye"},
    {"prompt": "the sk", "chosen": "y is blue", "rejected": "ies"},  # tokens merge over the border
    {"prompt": ASKED, "chosen": [turn("assistant", "because it is")], "rejected": [turn("assistant", "bye")]},
    {"chosen": [*ASKED, turn("assistant", "because")], "rejected": [*ASKED, turn("assistant", "hello, bye")]},
    {"chosen": "why is it blue? because", "rejected": "why is it blue? hello"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tokenizer with a chat template."""
    root = tmp_path_factory.mktemp("answers")
    source = write_json_lines(root / "text.jsonl", ["why is the sky blue? because it is. hello, bye."] * 9)
    train_tokenizer(find_sources([source])[0], Reading(), 290, root / "tokenizer")
    settings = root / "tokenizer" / "tokenizer_config.json"
    config = json.loads(settings.read_text()) | {"chat_template": TEMPLATE, "pad_token": "<|endoftext|>"}
    config["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    settings.write_text(json.dumps(config))
    return root


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(answers: Answers, numbers: list[int]) -> list[tuple[list[int], list[int]]]:
    """Return ids and the ids that count, of each row, without padding."""
    ids, labels = answers.collate(numbers)
    labels = labels if isinstance(labels, torch.Tensor) else labels["labels"]
    return [
        (row[: len(answers.rows[0].ids) + 99].tolist(), [label for label in counted.tolist() if label >= 0])
        for row, counted in zip(ids, labels, strict=True)
    ]


def test_pairs_have_the_tokens_of_trl(folder: Path) -> None:
    """Text and messages, with the prompt and without, also where tokens merge over the border of prompt and answer."""
    quiet()
    import datasets
    import transformers
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    args = trl.DPOConfig(output_dir=str(folder / "out"), report_to="none", use_cpu=True, bf16=False, max_length=None)
    for number, each in enumerate(PAIRS):
        data = datasets.Dataset.from_list([each])
        models: dict[str, Any] = {name: transformers.LlamaForCausalLM(config) for name in ("model", "ref_model")}
        trainer: Any = trl.DPOTrainer(**models, args=args, train_dataset=data, processing_class=tokenizer)
        (wanted,) = trainer.train_dataset
        answers = Answers(write(folder / f"{number}.jsonl", [each]), "pairs", folder / "tokenizer", 64)
        for row, kind in zip(answers.rows, ("chosen_ids", "rejected_ids"), strict=True):
            assert row.ids.tolist() == wanted["prompt_ids"] + wanted[kind]
            assert row.ids[row.counts == 1].tolist() == wanted[kind]


def test_conversations_count_the_tokens_of_the_assistant(folder: Path) -> None:
    rows: list[Any] = [
        {"messages": [*ASKED, turn("assistant", "because"), turn("user", "why?"), turn("assistant", "it is")]}
    ]
    rows += [{"prompt": "why is", "completion": " it?"}, {"text": "hello"}]
    answers = Answers(write(folder / "sft.jsonl", rows), "sft", folder / "tokenizer", 64)
    assert len(answers) == 3 and answers.width == 1 and answers.length == max(len(row.ids) for row in answers.rows) - 1
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    counted = [tokenizer.decode(row.ids[row.counts == 1].tolist()) for row in answers.rows]
    assert counted == [
        "because<|im_end|>\nit is<|im_end|>\n",
        " it?<|endoftext|>",
        "hello<|endoftext|>",
    ]
    ids, labels = answers.collate([1, 2])
    for row, label, each in zip(ids, labels, answers.rows[1:], strict=True):
        n = len(each.ids) - 1
        assert row[:n].tolist() == each.ids[:n].tolist() and not row[n + 1 :].any()
        places = [at for at in range(len(label)) if label[at] >= 0]
        assert places == [at - 1 for at in range(1, n + 1) if each.counts[at]]  # a first token has no one before it
        assert [label[at] for at in places] == [each.ids[at + 1] for at in places]


def test_unpaired_rows_include_mismatched_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}? ", "completion": word, "label": n % 2} for n, word in enumerate(("ab", "cde", "f"))]
    answers = Answers(write(tmp_path / "kto.jsonl", rows), "unpaired", "bytes", 64)
    texts = [bytes(row.ids.tolist()).decode() for row in answers.rows]
    assert texts == ["0? ab\0", "0? f\0", "1? cde\0", "1? ab\0", "2? f\0", "2? cde\0"]
    _, labels = answers.collate([1, 2])
    assert labels["desirable"].tolist() == [True, False] and labels["sample"].tolist() == [1, 2]
    answers.reference = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    assert answers.collate([1, 2])[1]["reference"].tolist() == [2, 4]
    assert answers.mismatched([1, 2])[1]["reference"].tolist() == [3, 5]


def test_a_batch_of_pairs_has_the_chosen_answers_first(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "chosen": "y", "rejected": "n"} for n in range(4)]
    answers = Answers(write(tmp_path / "pairs.jsonl", rows), "pairs", "bytes", 64)
    answers.reference = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    ids, labels = answers.collate([3, 1])
    assert [bytes(row.tolist()) for row in ids] == [b"3y", b"1y", b"3n", b"1n"]
    assert labels["reference"].tolist() == [6, 2, 7, 3]


def test_rows_are_cut_and_samples_without_an_answer_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"prompt": "12345678", "chosen": "ab", "rejected": "c"},  # the worse answer's end and the better one are cut
        {"prompt": "1234567890", "chosen": "ab", "rejected": "c"},  # nothing is left
        {"prompt": "1", "chosen": "a", "rejected": "bc"},
    ]
    answers = Answers(write(tmp_path / "cut.jsonl", rows), "pairs", "bytes", 8, multiple=4)
    assert (len(answers), answers.cut, answers.left_out, answers.length) == (2, 4, 1, 8)
    assert bytes(answers.rows[0].ids.tolist()) == b"12345678a" and answers.rows[0].counts.sum() == 1
    short = Answers(write(tmp_path / "short.jsonl", rows[2:]), "pairs", "bytes", 8, multiple=4)
    assert short.length == 4  # the longest row has 3 tokens to predict
    with pytest.raises(ConfigError, match=r"no sample in .* whose prompt is shorter than 8 tokens"):
        Answers(write(tmp_path / "none.jsonl", rows[1:2]), "pairs", "bytes", 8)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_tables_written_by_datasets_are_read(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{n}? ", "chosen": "yes", "rejected": "no"} for n in range(5)]
    data = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        data.to_parquet(tmp_path / "rows.parquet")
    else:
        data.save_to_disk(str(tmp_path))
    found = Answers(tmp_path, "pairs", "bytes", 64)
    wanted = Answers(write(tmp_path / "rows.jsonl", rows), "pairs", "bytes", 64)
    assert found.checksum == wanted.checksum and len(found) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 2: the columns are 'prompt', 'chosen', but 'chosen' and 'rejected' are"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' is empty, but a text is needed"),
        ({"prompt": "a", "chosen": "b", "rejected": [turn("assistant", "x")]}, "'rejected' is a list, but a text is"),
        ({"prompt": ASKED, "chosen": "b", "rejected": "c"}, "'chosen' is a str, but a list of messages is needed"),
        ({"chosen": "ab", "rejected": "cd"}, "have no common beginning with two ends: give 'prompt'"),
        ({"prompt": [{"content": "x"}], "chosen": [], "rejected": []}, "message 1 of 'prompt' is not an object with"),
    ],
)
def test_mistakes_in_answers_name_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    first = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError) as found:
        Answers(write(tmp_path / "rows.jsonl", [first, row]), "pairs", "bytes", 64)
    assert message in str(found.value) and str(found.value).startswith(f"{tmp_path}/rows.jsonl, line 2: ")


def test_texts_and_labels_of_another_type_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": "good"}]
    with pytest.raises(ConfigError, match="'label' is 'good', but true or false is needed"):
        Answers(write(tmp_path / "rows.jsonl", rows), "unpaired", "bytes", 64)
    (tmp_path / "rows.txt").write_text("hello")
    with pytest.raises(ConfigError, match="is a text, but rows with columns are needed"):
        Answers(tmp_path / "rows.txt", "sft", "bytes", 64)
    with pytest.raises(ConfigError, match="there is 1 sample: give at least 2"):
        Answers(write(tmp_path / "one.jsonl", [{"text": "a b"}]), "sft", "bytes", 64).split(0.5)
