"""Runs of training files on images: small vision-language folders with processors, pictures and their captions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.vision_models import IMAGE, PATCH_CASES, make

COLORS = ("black", "red", "green", "yellow", "blue", "pink")
NUMBERS = ("one", "two", "three")
_WORDS = ("<pad>", "<|im_end|>", "<|im_start|>", "user", "assistant", "what", "is", "it", *COLORS, *NUMBERS)
_ENDS = ("<|vision_end|>", "<|vision_start|>", "<|video_pad|>", "<|image_pad|>")
# What the chat template writes for an image: Gemma's processor puts the image tokens behind the begin of an image.
_MARKS = {"clip-llama": "<|image_pad|>", "gemma3": "<|vision_start|>"}
FILE = """\
name: images
method: sft
model: {folder: FOLDER}
data: {training: samples.jsonl, images: true}
batch: {size: 4, microbatch: 1}
training:
  steps: 4
  sequence: 32
  learning_rate: {peak: 0.5, schedule: constant, warmup_steps: 0}
optimizer: {type: SGD, decays: all, fused: false}
precision: fp64
clip: null
checkpoint: {every: 2}
monitor: {trace: false}
"""


def template_of(kind: str, marked: bool = False) -> str:
    """Return a chat template; marked: with ``{% generation %}`` around what the assistant says, with its end."""
    image = _MARKS.get(kind, "<|vision_start|><|image_pad|><|vision_end|>")
    parts = f"{{% for part in message.content %}}{{% if part.type == 'image' %}}{image}{{% else %}} {{{{ part.text }}}}"
    turn = parts + "{% endif %}{% endfor %}<|im_end|>"
    if marked:
        turn = (
            "{% if message.role == 'assistant' %}{% generation %}" + turn + "{% endgeneration %}{% else %}" + turn
        ) + "{% endif %}"
    head = "{% for message in messages %}<|im_start|>{{ message.role }} "
    return head + turn + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"


def tokenizer_of(kind: str, marked: bool = False) -> Any:
    """Return a tokenizer of words, whose image tokens are those of ``vision_models.py``."""
    import tokenizers
    import transformers

    more = [f"w{number}" for number in range(len(_WORDS), IMAGE - len(_ENDS) + 1)]
    words = {word: number for number, word in enumerate((*_WORDS, *more, *_ENDS))}
    assert words["<|image_pad|>"] == IMAGE
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"image_token": "<|image_pad|>"}
    names |= {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>"} if kind == "gemma3" else {}
    special = [*_WORDS[:3], *_ENDS]
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=special,
        extra_special_tokens=names,
    )
    made.chat_template = template_of(kind, marked)
    return made


def processor_of(kind: str, marked: bool = False) -> Any:
    """Return transformers' processor of a toy model; a part for videos, which needs torchvision, is left out."""
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tokenizer_of(kind, marked)
    if kind == "clip-llama":
        side = {"height": 8, "width": 8}
        images: Any = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=side)
        made: Any = transformers.LlavaProcessor(images, tokenizer, 4, "default", image_token="<|image_pad|>")
        made.num_additional_image_tokens = 1
    elif kind == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        made = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    else:
        sizes: Any = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}
        images = Qwen2VLImageProcessorPil(size={"shortest_edge": 16, "longest_edge": 4096}, **sizes)
        theirs: Any = getattr(transformers, f"{PATCH_CASES[kind][0]}Processor")
        kinds = {"check_argument_for_proper_class": lambda *_: None}
        made = type(theirs.__name__, (theirs,), kinds)(images, tokenizer, None)
    made.chat_template = tokenizer.chat_template
    return made


def write_folder(kind: str, folder: Path, marked: bool = False, model: Any = None) -> None:
    """Write a random vision-language model with its processor's files, as published folders have them."""
    (model or make(kind)).save_pretrained(folder)
    processor = processor_of(kind, marked)
    if kind in PATCH_CASES:
        processor.image_processor.save_pretrained(folder)
        processor.tokenizer.save_pretrained(folder)
    else:
        processor.save_pretrained(folder)


def picture(color: int, rows: int, columns: int) -> Any:
    """Return a picture of one color, with rows and columns of squares of 4 x 4 pixels, which end dark."""
    from PIL import Image

    channels = torch.tensor([color & 1, color >> 1 & 1, color >> 2]) * 200 + 20
    pixels = channels.expand(4 * rows, 4 * columns, 3).to(torch.uint8)
    return Image.fromarray(pixels.numpy())


def write_pictures(folder: Path, count: int, seed: int = 0, messages: bool = False) -> list[dict[str, Any]]:
    """Write pictures, and samples.jsonl with the caption of each; return the samples. Each sixth has two or none."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    drawn, samples = torch.Generator().manual_seed(seed), []
    for number in range(count):
        shown = {4: 2, 5: 0}.get(number % 6, 1)
        names, said = [], ["it", "is"]
        for image in range(shown):
            color, rows, columns = (torch.rand(3, generator=drawn) * torch.tensor([6, 3, 3])).int().tolist()
            names.append(f"pictures/{number}-{image}.png")
            picture(color, rows + 1, columns + 1).save(folder / names[-1])
            said += [COLORS[color], NUMBERS[rows], NUMBERS[columns]]
        part = {"type": "text", "text": "what is it"}
        user = [{"role": "user", "content": [*[{"type": "image"}] * shown, part]}]
        assistant = [{"role": "assistant", "content": [{"type": "text", "text": " ".join(said)}]}]
        texts = {"messages": user + assistant} if messages else {"prompt": user, "completion": assistant}
        samples.append({"images": names, **texts})
    write_samples(folder / "samples.jsonl", samples)
    return samples


def write_samples(file: Path, samples: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
