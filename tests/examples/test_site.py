"""The documentation: every page has a place, every link leads somewhere, every name, key and command has an entry.

The last test builds the site, as `make docs` does, and a warning is an error.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.core import TyperArgument, TyperGroup

from triax.cli.main import app
from triax.options.base import walk
from triax.options.engine import EngineOptions
from triax.options.local_updates import AsyncDiLoCo, DiLoCo

from support.command_line import output_of
from support.paths import DOCS, ROOT
from support.readme_blocks import blocks, commands

PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES, *sorted((ROOT / "examples").rglob("*.md"))]
LISTED = re.compile(r"^class (triax[\w.]+)|^(triax[\w.]+)[(:= ]", re.MULTILINE)


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while (each := anchor if not number else f"{anchor}-{number}") in found:
            number += 1
        found.add(each)
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of a page."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(page)) + re.findall(r"src(?:set)?=\"([^\"]+)\"", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@functools.cache
def conf() -> ModuleType:
    """docs/conf.py, which makes the reference."""
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_docs_lead_to_files_and_headings(tmp_path: Path) -> None:
    assert {str(page.relative_to(ROOT)): found for page in DOCUMENTS if (found := broken(page))} == {}
    sample = tmp_path / "sample.md"
    sample.write_text("# A `b`, c\n[](#a-b-c) [x](#none) [y](none.md) ![z](none.png)\n```sh\n[code](none)\n```\n")
    assert broken(sample) == ["#none", "none.md", "none.png"]


def test_every_page_is_in_the_table_of_contents() -> None:
    listed: set[Path] = set()
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "{toctree}":
                entries = [line for line in block.text.splitlines() if line and not line.startswith(":")]
                for entry in entries:
                    found = {page.parent / f"{entry}{suffix}" for suffix in (".md", ".ipynb")} & {*PAGES, *NOTEBOOKS}
                    assert found, f"{page.name} lists {entry}, which is no page"
                    listed |= found
    assert sorted({*PAGES, *NOTEBOOKS} - listed) == [DOCS / "index.md"]


WORDS, COLUMNS = 5, 88  # of a title in the sidebar, and of code beside it on a laptop
# Pages with blocks that a program reads or prints as they are, and are wider.
PRINTED = {"model.md", "faults.md", "plan.md", "schedules.md", "training-files.md", "zero.md"}


def test_titles_of_the_docs_have_at_most_five_words() -> None:
    titles = {page: re.search(r"^# (.+)$", prose(page), re.MULTILINE) for page in PAGES}
    assert {str(page): title and title[1] for page, title in titles.items() if not 1 <= words(title) <= WORDS} == {}


def words(title: re.Match[str] | None) -> int:
    return len(title[1].split()) if title is not None else 0


def test_code_of_the_docs_has_at_most_88_columns() -> None:
    wide = [
        f"{page.relative_to(DOCS)}:{block.line + number}: {line}"
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        for number, line in enumerate(block.text.splitlines(), 1)
        if len(line) > COLUMNS and not (block.language in ("", "text") and page.name in PRINTED)
    ]
    assert wide == []
    example = (ROOT / "examples" / "gpt_3d.py").read_text(encoding="utf-8")  # which docs/train.md shows
    assert max(map(len, example.splitlines())) <= COLUMNS


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    """The directives on the pages have all packages, and the directive's entries all names of a package."""
    text = (ROOT / "tests" / "laws" / "public_api.txt").read_text(encoding="utf-8")
    names = {found[1] or found[2] for found in LISTED.finditer(text)}
    top = {name for name in names if name.rpartition(".")[0] in conf().PACKAGES}  # not methods, which follow
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference" / "api").glob("*.md"))
    shown = re.findall(r"{public-names} (\S+)", pages)
    assert sorted(shown) == sorted(conf().PACKAGES) and len(top) > 200
    entries = "".join(map(conf().public_names, shown))
    assert top <= set(re.findall(r"^\.\. [\w:]+:: (\S+)$", entries, re.MULTILINE))


def test_every_engine_option_has_an_entry_in_the_docs() -> None:
    """The entry is under the heading of the class that declares the option."""
    assert "{engine-options}" in (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    text = conf().engine_options()
    for kind in (EngineOptions, DiLoCo, AsyncDiLoCo):
        for _, owner, each in walk(kind):
            entry = text.partition(f"## triax.{owner.__name__}\n")[2].partition("\n## ")[0]
            assert each.metadata["doc"].replace("|", "\\|") in entry, f"{owner.__name__}.{each.name}"


def test_each_table_of_the_reference_stands_on_a_page() -> None:
    pages = {name: DOCS / "reference" / f"{name}.md" for name in conf().TABLES}
    for name, page in pages.items():
        assert page.read_text(encoding="utf-8").endswith(f"```{{table-of}} {name}\n```\n")
        assert re.match(r"\| \w+ \|.*\n\|---\|", conf().TABLES[name]())


def test_symptoms_of_the_search_are_headings_of_troubleshooting() -> None:
    page = prose(DOCS / f"{conf().TROUBLESHOOTING}.md")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(conf().SYMPTOMS)
    typed = [word for words in conf().SYMPTOMS.values() for word in words]
    assert typed == [word.lower() for word in dict.fromkeys(typed)]


def test_every_command_and_option_has_an_entry_in_the_docs() -> None:
    """Compared with what the parser accepts, and with the help that it prints."""
    text = conf().commands()
    for words, command in leaves([], typer.main.get_command(app)):
        head = f"### triax {' '.join(words)}\n"
        assert text.count(head) == 1, head
        entry = text.split(head)[1].partition("\n#")[0]
        printed = output_of(*words, "--help", columns=200)
        missing = [
            option
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", printed)
            if option not in entry.replace("\\", "")
        ]
        assert set(missing) <= {"--help"}, f"triax {' '.join(words)}: {missing}"
        for parameter in command.params:
            name = parameter.name.upper() if isinstance(parameter, TyperArgument) else parameter.opts[-1]
            assert getattr(parameter, "hidden", False) or f"`{name}`" in entry, f"triax {' '.join(words)}: {name}"


def leaves(words: list[str], command: Any) -> list[tuple[list[str], Any]]:
    """The commands without sub-commands, each with the words that call it."""
    if isinstance(command, TyperGroup):
        return [leaf for name, each in command.commands.items() for leaf in leaves([*words, name], each)]
    return [(words, command)]


# ---------------------------------------------------------------------------------------------------- pictures


def pictures() -> list[Any]:
    """(page, picture, command that draws it, in a block or within a sentence)"""
    found = []
    for page in [ROOT / "README.md", *PAGES]:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"!\[[^\]]*\]\(([^)]+\.png)\)", text):
            name = Path(match[1]).name
            within = re.findall(r"`(triax [^`\n]*--plot [^`\n]*)`", text)
            typed = [
                each for each in (*(command for _, command in commands(text)), *within) if name in shlex.split(each)
            ]
            found.append(pytest.param(page, match[1], typed, id=f"{page.stem}-{name}"))
    return found


# Pictures that another program writes, and its command: one is measured, one drawn by a model that trains for minutes.
WRITTEN = {"timeline.png": "python benchmarks/timeline.py", "digits.png": "torchrun --nproc-per-node 4 digits.py 2 600"}
WRITTEN["growth.png"] = "python benchmarks/growth.py --plot docs/growth.png"


@pytest.mark.parametrize(("page", "picture", "typed"), pictures())
def test_the_shown_command_draws_the_picture_of_the_page(
    page: Path, picture: str, typed: list[str], tmp_path: Path
) -> None:
    if (program := WRITTEN.get(Path(picture).name)) is not None:
        assert program in page.read_text(encoding="utf-8")
        return
    matplotlib = pytest.importorskip("matplotlib")
    assert len(typed) == 1, f"{page.name} shows {picture}: say by which command it is drawn"
    words = shlex.split(typed[0])
    made = tmp_path / Path(picture).name
    words[words.index(made.name)] = str(made)
    output_of(*words[1:])
    shown = page.parent / picture
    if f"version{matplotlib.__version__}".encode() in shown.read_bytes():  # another version draws other letters
        assert pixels(made) == pixels(shown), f"draw it again: {typed[0]}"


def pixels(path: Path) -> tuple[bytes, int]:
    """Size and colors of a PNG file, without its date and version."""
    data, at, size, body = path.read_bytes(), 8, b"", b""
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        size += data[at + 8 : at + 8 + length] if kind == b"IHDR" else b""
        body += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return size, zlib.crc32(zlib.decompress(body))


# ---------------------------------------------------------------------------------------------------- the site


# Python's garbage collection would take a third of the CPU: documents are large trees, which all stay.
SPHINX = "import gc, sys; from sphinx.cmd.build import main; gc.disable(); sys.exit(main(sys.argv[1:]))"
# The stems of all words, for the search of the site, would take a tenth.
NO_SEARCH = "from sphinx.builders.html import StandaloneHTMLBuilder as Builder; Builder.search = False; "


# Furo reads each page again after Sphinx has written it: a fifth of the CPU.
@pytest.mark.parametrize("theme", ["basic", pytest.param("furo", marks=pytest.mark.exhaustive)])
def test_the_site_is_built_without_a_warning(tmp_path: Path, theme: str) -> None:
    pytest.importorskip("sphinx")
    assert conf().html_theme == "furo"
    # One process in each run, which needs a fifth less CPU: several send each other documents and environments.
    jobs = "1" if theme == "basic" else "auto"
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-j", jobs, "-D", f"html_theme={theme}"]
    options += ["-d", str(tmp_path / "cache")]
    source = NO_SEARCH + SPHINX if theme == "basic" else SPHINX
    words = [sys.executable, "-c", source, *options, str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inventory = (tmp_path / "html" / "objects.inv").read_bytes()
    names = zlib.decompress(inventory.split(b"\n", 4)[4]).decode()
    text = (ROOT / "tests" / "laws" / "public_api.txt").read_text(encoding="utf-8")
    listed = {found[1] or found[2] for found in LISTED.finditer(text)}
    top = {name for name in listed if name.rpartition(".")[0] in conf().PACKAGES}
    assert top <= {line.split(" ")[0] for line in names.splitlines()}
    assert "https://" in (tmp_path / "html" / "links.txt").read_text(encoding="utf-8")
    if theme == "furo":  # with the search: Sphinx's script gives an entry 100 points, and a title at most 16
        index = (tmp_path / "html" / "searchindex.js").read_text(encoding="utf-8")
        pages = json.loads(re.findall(r'"?docnames"?:(\[[^\]]*\])', index)[0])
        (page, place, main) = json.loads(re.findall(r'"out of memory":\[(\[[^\]]*\])\]', index)[-1])
        assert (pages[page], place, bool(main)) == (conf().TROUBLESHOOTING, "out-of-memory", True)
