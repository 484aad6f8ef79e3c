"""The tokenizer `bytes` as files that transformers loads: the id of a byte is its value, and byte 0 ends a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base.files import read_object

END_OF_BYTES = "<|endoftext|>"  # text of the id 0


class ByteTokenizer:
    """Tokenizer `bytes`, as ``save_hf`` takes one."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``AutoTokenizer.from_pretrained``."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_BYTES, "model_max_length": 10**9}
        for name, value in (("tokenizer.json", self._content()), ("tokenizer_config.json", config)):
            Path(folder, name).write_text(json.dumps(value, indent=1), encoding="utf-8")

    def is_in(self, folder: Path) -> bool:
        """Return True if a folder has these files, which then need no package to read them."""
        file = folder / "tokenizer.json"
        return file.is_file() and file.stat().st_size < 10**5 and read_object(file) == self._content()

    def _content(self) -> dict[str, Any]:
        # Byte-level tokenizers write a byte as a character: a printable byte as itself, the others from 256 on (GPT-2).
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = (byte for byte in range(256) if byte not in printable)
        characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        vocab = {END_OF_BYTES: 0} | {characters[byte]: byte for byte in range(1, 256)}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": END_OF_BYTES, **flags, "special": True}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
