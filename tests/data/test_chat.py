"""Conversations: tokens by the chat template, and labels only on the assistant's tokens, as in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triax
from triax.base.errors import ConfigError
from triax.cli.model_text import TokenizerText
from triax.data import Answers, TokenData, TokenFolder, train_tokenizer
from triax.data.bad_document import BadDocument
from triax.data.chat import ChatTemplate
from triax.data.sources import Reading, find_sources
from triax.data.tokenization import tokenize
from triax.train.methods import Rollouts, grpo_loss

from support.tokenized import write_json_lines

pytest.importorskip("transformers")

HEAD = "{{ '<|im_start|>' + m.role + '\\n' }}"
PLAIN = "{% for m in messages %}" + HEAD + "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
MARKED = (
    "{% for m in messages %}" + HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}"
)
MARKED += "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
# As templates of reasoning models: thoughts of all but the last answer are left out.
FORGETS = "{% for m in messages %}" + HEAD
FORGETS += "{{ (m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>\\n' }}{% endfor %}"
FORGETS += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def turns(*contents: str, roles: str = "sua") -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": content} for role, content in zip(roles, contents, strict=True)]


CONVERSATIONS = [
    turns("be brief", "why?", "because of the é 🙂 sky"),
    turns("why?", "because", "and why?", "no\n\nidea  ", roles="uaua"),
    turns("hello", "hi", roles="ua"),
    turns("why " * 10, "long " * 20, roles="ua"),
    turns("hello", "one", "two", "bye", "x", roles="uaaua"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Path:
    """A folder of a tokenizer for each template."""
    root: Path = tmp_path_factory.mktemp("chat")
    source = write_json_lines(root / "text.jsonl", ["why is the sky blue? because it is. hello, bye."] * 9)
    for name, template in {"plain": PLAIN, "marked": MARKED, "forgets": FORGETS, "none": None}.items():
        train_tokenizer(find_sources([source])[0], Reading(), 290, root / name)
        config = json.loads((root / name / "tokenizer_config.json").read_text())
        config |= {"chat_template": template} if template else {}
        config["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
        (root / name / "tokenizer_config.json").write_text(json.dumps(config))
    write_json_lines(root / "chat.jsonl", CONVERSATIONS, "messages")
    return root


def reference(folder: Path, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, chat_template=MARKED)
    found: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return list(found["input_ids"]), list(found["assistant_masks"])


@pytest.mark.parametrize("name", ["plain", "marked"])
def test_assistant_tokens_equal_those_marked_by_transformers(made: Path, name: str) -> None:
    template = ChatTemplate(made / name)
    for messages in CONVERSATIONS:
        found = template.encode(messages)
        assert isinstance(found, tuple)
        ids, counted = reference(made / name, messages)
        assert found[0].tolist() == ids and found[1].tolist() == counted
        assert 0 < sum(counted) < len(counted)


def test_only_tokens_of_the_assistant_have_labels(made: Path, tmp_path: Path) -> None:
    tokenize([made / "chat.jsonl"], made / "plain", tmp_path / "out", chat=True)
    facts = TokenFolder(tmp_path / "out").index.tokenizer
    assert facts.vocab_size == TokenFolder(tmp_path / "out").largest + 1  # with tokens that the configuration adds
    wanted = []
    for messages in CONVERSATIONS:
        ids, counted = reference(made / "plain", messages)
        wanted.append([token if count else -100 for token, count in zip(ids, counted, strict=True)][1:] + [-100])
    for length, packing in ((400, None), (16, "cut"), (16, "whole"), (7, "whole")):
        data = TokenData(tmp_path / "out", length, packing=packing, shuffle=False, vocab_size=400)
        found: dict[bytes, list[int]] = {}
        for (ids, documents), labels in data.loader(1, 1, epochs=1, threads=0):
            assert bool(((labels == -100) | (labels == torch.roll(ids, -1, 1)))[:, :-1].all())
            for number in range(int(documents.max()) + 1):
                inside = documents[0] == number
                found.setdefault(ids[0][inside].numpy().tobytes(), labels[0][inside].tolist())
        opened = TokenFolder(tmp_path / "out")
        for number, follow in enumerate(wanted):
            tokens = opened.document(number).astype(np.int64)
            if length == 400:
                assert found[tokens.tobytes()] == follow
        counts = sum(sum(label != -100 for label in labels) for labels in found.values())
        if packing != "cut":  # pieces that are equal are one here
            assert counts <= sum(label != -100 for labels in wanted for label in labels)
        total = sum(int((labels != -100).sum()) for _, labels in data.loader(1, 1, epochs=1))
        assert total == sum(label != -100 for labels in wanted for label in labels)


# Rows with the columns of ShareGPT and of Alpaca, and the same conversations as messages (LLaMA-Factory reads them so).
OTHER_COLUMNS: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
    (
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}], "system": "be brief"},
        turns("be brief", "why?", "so"),
    ),
    (
        {"conversations": [{"from": name, "value": name} for name in ("system", "user", "assistant")]},
        turns("system", "user", "assistant"),
    ),
    ({"instruction": "add", "input": "1 2", "output": "3"}, turns("add\n1 2", "3", roles="ua")),
    ({"instruction": "hello", "input": "", "output": "hi"}, turns("hello", "hi", roles="ua")),
    (
        {"instruction": "and?", "output": "no", "history": [["a", "b"], ["c", "d"]], "system": "be kind"},
        turns("be kind", "a", "b", "c", "d", "and?", "no", roles="suauaua"),
    ),
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a file of JSON lines, or of Parquet, which has all columns in each row."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_columns_of_sharegpt_and_alpaca_are_read_as_messages(made: Path, tmp_path: Path, ending: str) -> None:
    from trl import maybe_convert_to_chatml

    pytest.importorskip("pyarrow.parquet")
    assert maybe_convert_to_chatml(json.loads(json.dumps(OTHER_COLUMNS[1][0])))["messages"] == OTHER_COLUMNS[1][1]
    wanted = [reference(made / "plain", messages) for _, messages in OTHER_COLUMNS]
    files = [write_rows(tmp_path / f"{at}.{ending}", [row]) for at, (row, _) in enumerate(OTHER_COLUMNS)]
    tokenize(files, made / "plain", tmp_path / "out", chat=True)
    folder = TokenFolder(tmp_path / "out")
    assert [folder.document(number).tolist() for number in range(len(files))] == [ids for ids, _ in wanted]
    for file, (ids, counted) in zip(files, wanted, strict=True):
        answers = Answers(file, "sft", made / "plain", 256)
        _, labels = answers.collate([answers[0]])
        follow = [token if count else -100 for token, count in zip(ids, counted, strict=True)][1:]
        assert [label for label in labels.flatten().tolist() if label != -100] == [t for t in follow if t != -100]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "turn 1 of 'conversations' is from 'narrator'"),
        ({"conversations": "why?"}, "'conversations' is not a list of objects"),
        ({"conversations": [{"from": "human", "value": 3}]}, "turn 1 of 'conversations' is int, but a text is needed"),
        ({"instruction": "a", "output": None}, "output is NoneType, but a text is needed"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "'history' is not a list of pairs"),
    ],
)
def test_wrong_columns_of_conversations_are_refused_by_line(
    made: Path, tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=f"line 1: {words}"):
        tokenize([file], made / "plain", tmp_path / "out", chat=True)
    with pytest.raises(ConfigError, match=f"line 1: {words}"):
        Answers(file, "sft", made / "plain", 64)


BAD = {
    "{{ 1 // 0 }}": "division or modulo by zero",
    "{{ 2.0 ** 5000 }}": "Numerical result out of range",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth",
    "{% for a in range(10**9) %}x{% endfor %}": "Range too big",
    "{{ 'x' * (10**8 + 1) }}": "100000001 characters",
}
# Tenths of a second; a few levels more: years.
SLOW = "{% for a in range(19) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_failing_chat_template_names_its_conversation(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is one line about the conversation; one that does not end is an error of the run."""
    folder = shutil.copytree(made / "plain", tmp_path / "bad")
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def template_of(text: str) -> ChatTemplate:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": text}))
        return ChatTemplate(folder)

    for text, words in BAD.items():
        refused = template_of(text).encode(CONVERSATIONS[0])
        assert isinstance(refused, BadDocument) and words in str(refused) and "\n" not in str(refused), (text, refused)
        with pytest.raises(BadDocument, match=words):
            template_of(text).tokens(CONVERSATIONS[0])
    monkeypatch.setattr("triax.data.chat._SECONDS", 0.02)
    with pytest.raises(ConfigError, match=r"needs more than 0.02 s .* its chat template does not end"):
        template_of(SLOW).encode(CONVERSATIONS[0])


def callers(tokenizer: Any, folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Return the calls that run a tokenizer's chat template, beside the tokenization of data."""
    from triax.compat.lm_eval import LanguageModel

    grid, config = triax.Grid(), triax.LlamaConfig(400, 8, 8, 1, 1)
    module = triax.PipelineModule(triax.llama_layers(config), grid=grid, loss_fn=grpo_loss(grid, 400))
    engine = triax.Engine(module, optimizer=torch.optim.SGD, batch=2)
    sampler = triax.init_inference(engine, tokenizer=tokenizer)
    rollouts = Rollouts(engine, sampler, lambda *_, **__: [0.0], group=2, max_new_tokens=1)
    return {
        "triax generate --chat": TokenizerText(folder, []).chat,
        "lm-eval": LanguageModel(engine, tokenizer).apply_chat_template,
        "GRPO": lambda messages: rollouts([messages]),
    }


@pytest.mark.parametrize(
    ("template", "seconds", "words"),
    [("{{ 1 // 0 }}", 20, "by zero"), ("{{ 'x ' * 10001 }}", 20, "are too many"), (SLOW, 0.02, "does not end")],
    ids=["error", "too long", "endless"],
)
def test_generate_lm_eval_and_grpo_limit_chat_templates(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, seconds: float, words: str
) -> None:
    """lm-eval and GRPO ran the templates of transformers' tokenizers without the limits."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(made / "plain", tmp_path / "bad")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    calls = callers(AutoTokenizer.from_pretrained(folder), folder)
    monkeypatch.setattr("triax.data.chat._LONGEST", 10**4)
    monkeypatch.setattr("triax.data.chat._SECONDS", seconds)
    for name, call in calls.items():
        with pytest.raises((BadDocument, ConfigError)) as raised:
            call(CONVERSATIONS[0][:2])
        assert words in str(raised.value) and "\n" not in str(raised.value), name


def test_a_template_that_changes_earlier_messages_is_refused(made: Path) -> None:
    template = ChatTemplate(made / "forgets")
    assert isinstance(template.encode(turns("a", "<think>x</think>b", roles="ua")), tuple)
    refused = template.encode(turns("a", "<think>x</think>b", "c", "d", roles="uaua"))
    assert isinstance(refused, BadDocument) and "changes message 2 after later ones" in str(refused)


def test_a_tokenizer_without_a_chat_template_is_refused(made: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template\. Add a file chat_template.jinja"):
        ChatTemplate(made / "none")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "'messages' is null, but a list of messages is required"),
        ([], "'messages' is an empty list"),
        ("text", "'messages' is a text"),
        ([{"content": "a"}], "message 1 is not an object with a 'role'"),
        ([*CONVERSATIONS[0], 3], "message 4 is not an object"),
        (turns("a", roles="u"), "no message is the assistant's"),
        ([{"role": "user"}, *CONVERSATIONS[0]], "the chat template refuses the messages"),
        ([{"role": "assistant", "content": ["a"]}], "the chat template refuses the messages"),
        (turns("\ud800", "x", roles="ua"), "the chat template refuses the messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_conversation_that_cannot_be_used_is_named_by_line(
    made: Path, tmp_path: Path, bad: Any, message: str
) -> None:
    source = write_json_lines(tmp_path / "rows.jsonl", [CONVERSATIONS[0], bad], "messages")
    with pytest.raises(ConfigError) as raised:
        tokenize([source], made / "plain", tmp_path / "out", chat=True)
    text = str(raised.value)
    assert text.startswith(f"{source}, line 2: {message}") and "\n" not in text, text
