"""Training files with images (``data.images``): beside TRL's collator and transformers' models in float64."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triax.data.image_answers import ImageAnswers
from triax.models.huggingface.config import entries
from triax.models.huggingface.save import wrapping

from support.command_line import output_of, run_triax
from support.exact_norms import exact
from support.file_runs import Recorder, run_watched, validations
from support.image_runs import FILE, picture, processor_of, write_folder, write_pictures, write_samples
from support.method_runs import STOP, batches_of, refusal_of
from support.readme_blocks import block_of
from support.toy_answers import quiet
from support.vision_models import PATCH_CASES, make

KINDS = ("clip-llama", "gemma3", *PATCH_CASES)
RATE = 0.5


class InFloat64(Recorder):
    """Watch of a run whose modules do not round to fp32."""

    def start(self, run: Any) -> None:
        super().start(run)
        self.context = exact(run.engine.module)
        self.context.__enter__()

    def names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by the names of transformers' live model."""
        table = entries(wrapping(self.run.engine.module).names(), {})
        return {self._theirs(table, name): tensor for name, tensor in tensors.items()}

    def _theirs(self, table: dict[str, Any], name: str) -> str:
        return str((table[name].live or table[name].theirs)[0]) if name in table else name


def run(root: str, *changes: str) -> tuple[list[float], dict[str, Tensor]]:
    """Be a rank of a run; return the losses of its steps, and the gradients of the first, by transformers' names.

    Gradients of adapters have triax's names.
    """
    watch = InFloat64()
    try:
        run_watched(watch, root, "images.yaml", *changes)
    finally:
        if hasattr(watch, "context"):
            watch.context.__exit__(None, None, None)
    return [loss for loss, _, _ in watch.steps], watch.names(watch.steps[0][1])


def as_trl(kind: str, root: Path, samples: list[dict[str, Any]], marked: bool = False) -> Any:
    """Return the microbatch of TRL's collator for some samples."""
    quiet()
    from PIL import Image
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    opened = copy.deepcopy(samples)
    for sample in opened:
        sample["images"] = [Image.open(root / name) for name in sample["images"]]
    collator = DataCollatorForVisionLanguageModeling(
        processor_of(kind, marked), completion_only_loss=not marked, assistant_only_loss=marked
    )
    return collator(opened)


def place_of(root: Path, kind: str, count: int = 24) -> tuple[Path, list[dict[str, Any]]]:
    """Return a folder with a model, samples and a training file; and the samples."""
    write_folder(kind, root / "toy")
    (root / "images.yaml").write_text(FILE.replace("FOLDER", "toy"))
    return root, write_pictures(root, count)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_images_equal_those_of_trls_collator(tmp_path: Path, kind: str, marked: bool) -> None:
    """Prompts with completions; and conversations whose template marks the assistant's tokens."""
    write_folder(kind, tmp_path / "toy", marked)
    samples = write_pictures(tmp_path, 12, messages=marked)
    data = ImageAnswers(tmp_path / "samples.jsonl", "sft", tmp_path / "toy", 64)
    assert len(data) == 12 and data.left_out == 0
    for numbers in ([0, 1], [2, 4, 5], [5], [4, 10, 3]):
        mine = data.collate([data[number] for number in numbers])
        theirs = as_trl(kind, tmp_path, [samples[number] for number in numbers], marked)
        length = theirs["input_ids"].shape[1]
        for name in ("input_ids", "labels"):
            assert torch.equal(mine[name][:, :length], theirs[name]), name
        assert (mine["input_ids"][:, length:] == 0).all() and (mine["labels"][:, length:] == -100).all()
        for name in ("pixel_values", "image_grid_thw"):
            assert (name in mine) == (name in theirs)
            assert name not in mine or torch.equal(mine[name], theirs[name]), name
    assert data.length == max(len(row.ids) for row in data.rows)


def reference(kind: str, root: Path, samples: list[dict[str, Any]], steps: int) -> tuple[list[float], Any]:
    """Train transformers' model by SGD in float64 on TRL's microbatches; return losses, and the first gradients."""
    model, losses = make(kind), list[float]()
    gradients: Any = {}
    for numbers in batches_of(samples)[:steps]:
        given = as_trl(kind, root, [samples[number] for number in numbers])
        labels = given.pop("labels")
        with exact(model):
            logits = model(**given).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=RATE)
    return losses, (gradients, model)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("qwen2_5_vl", [(1, ""), (4, "grid={pipe: 2, data: 2}; zero=2")]),
        ("qwen3_vl", [(2, "grid.tensor=2"), (2, "zero=3")]),
        ("gemma3", [(2, "grid.pipe=2; batch.microbatch=2")]),
        ("clip-llama", [(2, "grid.pipe=2; zero=1; recompute=full")]),
    ],
)
def test_runs_on_images_equal_transformers_on_grids(
    ranks: Any, tmp_path: Path, kind: str, parts: list[tuple[int, str]]
) -> None:
    import transformers

    root, samples = place_of(tmp_path, kind)
    losses, (gradients, model) = reference(kind, root, samples, 4)
    for number, (size, changes) in enumerate(parts):
        words = [f"name=run-{number}", *filter(None, changes.split("; "))]
        for found, own in ranks(size, run, str(root), *words, timeout=240):
            assert found == pytest.approx(losses, rel=1e-10)
            assert own.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(own[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
        out = root / "runs" / f"run-{number}" / "model"
        written = transformers.AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float64)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(written.state_dict()[name], value, rtol=1e-10, atol=1e-12, msg=name)
        for file in ("preprocessor_config.json", "processor_config.json", "tokenizer.json", "chat_template.jinja"):
            assert (out / file).exists() == (root / "toy" / file).exists(), file


def test_runs_on_images_resume_with_the_same_batches(ranks: Any, tmp_path: Path) -> None:
    root, _ = place_of(tmp_path, "qwen2_5_vl")
    whole = ranks(1, run, str(root), "name=whole", "data.held_out=0.3")[0][0]
    first = ranks(1, run, str(root), "name=parts", "data.held_out=0.3", STOP)[0][0]
    rest = ranks(2, run, str(root), "name=parts", "data.held_out=0.3", "grid.pipe=2")[0][0]
    assert len(first) == 1 and [*first, *rest] == pytest.approx(whole, rel=1e-10)


def test_adapters_train_on_images_and_merge_into_the_folder(ranks: Any, tmp_path: Path) -> None:
    import transformers

    root, _ = place_of(tmp_path, "qwen3_vl")
    lora = "lora={rank: 2, alpha: 3, targets: '.*language_model.*(q_proj|down_proj)'}"
    (losses, _), (again, _) = (
        ranks(size, run, str(root), f"name=lora-{size}", lora, more)[0]
        for size, more in ((1, "training.steps=3"), (2, "grid.pipe=2"))
    )
    assert again[:3] == pytest.approx(losses, rel=1e-10) and losses[0] != losses[1]
    read: Any = transformers.AutoModelForImageTextToText.from_pretrained
    before, after = (read(root / name, dtype=torch.float64).state_dict() for name in ("toy", "runs/lora-1/model"))
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert changed == {
        name for name in before if "language_model" in name and name.split(".")[-2] in ("q_proj", "down_proj")
    }


def test_images_in_any_form_of_trls_columns_make_equal_rows(tmp_path: Path) -> None:
    """Paths or bytes, one image, text contents, Parquet, and pictures that EXIF turns."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    write_folder("qwen2_5_vl", tmp_path / "toy")
    (sample,) = write_pictures(tmp_path, 1)
    turned = picture(2, 1, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.rotate(90, expand=True).save(tmp_path / "pictures" / "turned.png", exif=exif)
    turned.save(tmp_path / "pictures" / "upright.png")
    content = (tmp_path / sample["images"][0]).read_bytes()
    texts = [
        {"role": turn["role"], "content": turn["content"][-1]["text"]}
        for turn in sample["prompt"] + sample["completion"]
    ]
    forms = {
        "image": {"image": sample["images"][0], "prompt": texts[:1], "completion": texts[1:]},
        "messages": {"images": sample["images"], "messages": texts},
        "bytes": sample | {"images": [{"bytes": content, "path": None}]},
        "upright": sample | {"images": ["pictures/upright.png"]},
        "turned": sample | {"images": ["pictures/turned.png"]},
    }
    found = {}
    for name, form in forms.items():
        if name == "bytes":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([form]), tmp_path / "bytes.parquet")
        else:
            write_samples(tmp_path / f"{name}.jsonl", [form])
        file = tmp_path / f"{name}.{'parquet' if name == 'bytes' else 'jsonl'}"
        found[name] = ImageAnswers(file, "sft", tmp_path / "toy", 64).collate([0])
    plain = ImageAnswers(tmp_path / "samples.jsonl", "sft", tmp_path / "toy", 64).collate([0])
    for name, wanted in (("image", plain), ("messages", plain), ("bytes", plain), ("turned", found["upright"])):
        assert found[name].keys() == wanted.keys()
        assert all(torch.equal(found[name][key], value) for key, value in wanted.items()), name
    assert found["turned"]["image_grid_thw"].tolist() == [[1, 2, 6]]


def test_rows_of_images_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    write_folder("qwen2_5_vl", tmp_path / "toy")
    samples = write_pictures(tmp_path, 12)
    every = ImageAnswers(tmp_path / "samples.jsonl", "sft", tmp_path / "toy", 64)
    lengths = [len(row.ids) for row in every.rows]
    most = sorted(lengths)[7]
    data = ImageAnswers(tmp_path / "samples.jsonl", "sft", tmp_path / "toy", most)
    kept = [number for number, length in enumerate(lengths) if length <= most]
    assert (len(data), data.left_out, data.cut) == (len(kept), 12 - len(kept), 0) and data.length == most
    for place, number in enumerate(kept):
        assert data.rows[place].ids.tolist() == every.rows[number].ids.tolist()
        assert [image.name for image in data.beside[place]] == [
            str(tmp_path / name) for name in samples[number]["images"]
        ]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Qwen2.5-VL, samples, a training file, and files of samples with a mistake in line 2."""
    root, samples = place_of(tmp_path_factory.mktemp("images"), "qwen2_5_vl", 6)
    (root / "pictures" / "damaged.png").write_bytes(b"no picture")
    wrong: dict[str, dict[str, Any]] = {
        "missing": {"images": ["pictures/none.png"]},
        "damaged": {"images": ["pictures/damaged.png"]},
        "number": {"images": [7]},
        "more": {"images": samples[0]["images"] * 2},
        "none": {"images": []},
        "text": {"prompt": "what is it", "completion": "it is"},
        "long": {"images": ["pictures/long.png"]},
        "token": {"completion": [{"role": "assistant", "content": "it is <|image_pad|>"}]},
    }
    processor_of("qwen2_5_vl").tokenizer.save_pretrained(root / "words")
    (root / "smol").mkdir()
    (root / "smol" / "config.json").write_text('{"model_type": "smolvlm"}')
    picture(1, 1, 1).resize((1000, 4)).save(root / "pictures" / "long.png")
    for name, change in wrong.items():
        write_samples(root / f"{name}.jsonl", [samples[0], samples[0] | change])
    return root


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.training=missing.jsonl"], "missing.jsonl, line 2: the image pictures/none.png cannot be read"),
        (["data.training=damaged.jsonl"], "damaged.jsonl, line 2: the image pictures/damaged.png cannot be read"),
        (["data.training=number.jsonl"], "line 2: an image is 7, but a path or {bytes, path} is needed"),
        (["data.training=more.jsonl"], "line 2: the messages have 1 parts of the type 'image', but there are 2 images"),
        (["data.training=none.jsonl"], "line 2: the messages have 1 parts of the type 'image', but there are 0 images"),
        (["data.training=text.jsonl"], "line 2: the sample is a text"),
        (["data.training=long.jsonl"], "line 2: the image pictures/long.png is 1000 x 4"),
        (["data.training=token.jsonl"], "line 2: the chat template makes 2 image tokens of 1 images"),
        (["training.sequence=8"], "there is no sample in samples.jsonl whose prompt is shorter than 8 tokens"),
        (["data.images=false"], "a training file trains it with data.images: true"),
        (["method=dpo"], "method works with triax's own models, and data.images takes the layers of transformers"),
        (["sample={prompt: it}"], "sample works with triax's own models"),
        (["evaluate.tasks=piqa"], "evaluate.tasks works with triax's own models"),
        (["grid.context=2"], "grid.context works with triax's own models"),
        (["grid.tensor=2", "grid.sequence_parallel=true"], "grid.sequence_parallel works with triax's own models"),
        (["model={preset: bytes-tiny}"], "data.images needs the folder of a vision-language model"),
        (["model={layers: 'mine.py:layers'}"], "data.images needs the folder of a vision-language model"),
        (["model.weights=false", "model.overrides={hidden_size: 8}"], "model.overrides works with triax's own models"),
        (["tokenizer=bytes"], "tokenizer bytes has 256 tokens"),
        (["tokenizer=words"], "words has no processor of images that transformers can load"),
        (
            ["schedule={name: 1f1b, slices: 2}"],
            "schedule.slices: data.images has images, whose tokens belong to whole sequences",
        ),
        (["model.folder=smol"], "data.images does not make the rows of a smolvlm: train it with triax.Engine"),
        (["method=null"], "data.images needs the folder of a vision-language model, and a method"),
    ],
)
def test_runs_on_images_refuse_mistakes(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], message: str, capsys: Any
) -> None:
    monkeypatch.chdir(qwen)
    assert message in refusal_of("images", changes, capsys)


def test_explain_and_dry_run_refuse_layers_of_images(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(qwen)
    for words in (["train", "--explain"], ["train", "--dry-run"], ["memory"]):
        code, said = run_triax(*words, "images.yaml")
        assert code == 2 and "data.images takes" in said and "training.steps=3" in said


def test_the_guides_training_file_learns_what_pictures_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that sees the pictures' sizes, but no color, has a loss of at least ln 6 for each picture."""
    monkeypatch.chdir(tmp_path)
    write_folder("qwen3_vl", tmp_path / "toy")
    write_pictures(tmp_path, 600)
    Path("samples.jsonl").rename("captions.jsonl")
    Path("captions.yaml").write_text(block_of("guides/vision-language.md", "# captions.yaml"))
    training = "training={steps: 160, sequence: 64, learning_rate: {peak: 0.01, schedule: linear}}"
    adam = "optimizer={type: AdamW, betas: [0.9, 0.99], weight_decay: 0.0}"
    changes = (
        "grid.pipe=1",
        "batch={size: 8, microbatch: 8}",
        "precision=fp32",
        "checkpoint=false",
        "evaluate.every=160",
    )
    said = output_of("train", "captions.yaml", "model.folder=toy", training, adam, *changes)
    (loss,) = validations(Path("runs", "captions"))
    assert f"loss    {loss:.4f} nats per token on held-out samples" in said
    _, unseen = ImageAnswers("captions.jsonl", "sft", "toy", 64).split(0.1)
    numbers = [unseen[at] for at in range(len(unseen) // 8 * 8)]
    pictures = sum(len(unseen.beside[number]) for number in numbers)
    blind = pictures * math.log(6) / sum(int(unseen.rows[number].counts.sum()) for number in numbers)
    assert loss < blind
