"""``triax generate --chat``: the answers of transformers, turn by turn, with all turns before in the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from triax.data import train_tokenizer
from triax.data.sources import Reading, find_sources

from support.command_line import run_main, run_triax
from support.tokenized import write_json_lines

transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\\n' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
TURNS = ["hello", "why is the sky blue?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with a chat template; its answers do not repeat themselves."""
    root = tmp_path_factory.mktemp("chat")
    source = write_json_lines(root / "text.jsonl", ["why is the sky blue? because it is. hello, bye."] * 9)
    train_tokenizer(find_sources([source])[0], Reading(), 280, root / "model")
    settings = root / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    transformers.set_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=280,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=160,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).double().save_pretrained(root / "model")
    return root / "model"


def answers_of_transformers(folder: Path, system: str) -> list[str]:
    """Return the answers to the turns, greedily, 12 tokens each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages, answers = [{"role": "system", "content": system}], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
        answers.append(tokenizer.decode(made)[len(tokenizer.decode(ids[0])) :].removesuffix("<|endoftext|>"))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_chat_answers_equal_those_of_transformers(ranks: Any, folder: Path) -> None:
    """It runs on one process, and on two stages, where the first rank reads for all."""
    wanted = answers_of_transformers(folder, "be brief")
    assert all(wanted) and wanted[0] != wanted[1]
    words = (folder, "--chat", "--system", "be brief", "--temperature", 0, "--max-new-tokens", 12)
    lines = f"{TURNS[0]}\n\n  {TURNS[1]}\n"
    shown = "".join(f"{answer}\n" for answer in wanted)
    code, out, err = run_main("generate", *words, lines=lines)
    assert (code, out) == (0, shown), err
    code, out, err = run_main("generate", *words, "--prompt", TURNS[0])
    assert (code, out) == (0, f"{wanted[0]}\n"), err
    for rank, (code, out, err) in enumerate(ranks(2, two_stages, folder, words, lines, init_group=False)):
        assert (code, out) == (0, "" if rank else shown), err


def test_special_tokens_end_an_answer_and_are_not_shown(folder: Path, tmp_path: Path) -> None:
    """The tokenizer's end ends an answer if the configuration names no end; no special token is printed."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)["input_ids"]
    answer = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()[len(ids) :]
    # Exchange the output rows of a token of the answer and of the tokenizer's end: now the answer has the end there.
    length = next(place for place in range(2, 8) if answer[place] not in answer[:place])
    rows, exchanged = model.lm_head.weight.data, [tokenizer.eos_token_id, answer[length]]
    rows[exchanged] = rows[exchanged[::-1]]
    shown = tokenizer.decode(answer[:length], skip_special_tokens=True) + "\n"
    unused = model.config.vocab_size - 1
    for end_of_config, limit in ((None, 8), (unused, length + 1)):
        model.config.eos_token_id = model.generation_config.eos_token_id = end_of_config
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        words = (tmp_path / "model", "--chat", "--prompt", "hello", "--temperature", 0, "--max-new-tokens", limit)
        code, out, err = run_main("generate", *words)
        assert (code, out) == (0, shown), err


def two_stages(folder: Path, words: tuple[object, ...], lines: str) -> tuple[Any, str, str]:
    return run_main("generate", *words, "--pipe", 2, lines=lines)


def test_chat_refuses_options_that_exclude_it(folder: Path, tmp_path: Path) -> None:
    for words, message in (
        (("--chat", "--pipe", 2), "--chat reads messages from the terminal, but the 2 processes"),
        (("--prompt", "x", "--system", "y"), "--system is a message of --chat"),
        (("--chat", "--samples", 2), "--chat prints one answer while it is generated"),
        ((), "--prompt is empty"),
    ):
        code, said = run_triax("generate", folder, *words)
        assert code == 2 and message in said
