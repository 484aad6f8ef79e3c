"""The documentation site: `make docs` builds it with Sphinx, MyST and Furo into build/docs, without the network.

Pages are Markdown and notebooks, which are shown and not run; docs/index.md is the table of contents. Three directives
make the reference from the library itself: `public-names` the public names of a package with their docstrings,
`engine-options` the options of `triax.Engine`, `commands` the command `triax` with its options.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.core import TyperArgument, TyperGroup

import triax
from triax.base.foreign_tables import read_table
from triax.cli.main import __file__ as command_line_file
from triax.cli.main import app as command_line
from triax.cli.verbs import GROUPS
from triax.compat.deepspeed.config.document import markdown as deepspeed_keys
from triax.compat.deepspeed.ledger import markdown as deepspeed_names
from triax.options.base import Options, hints_of, sections_in, walk
from triax.options.engine import EngineOptions
from triax.options.local_updates import AsyncDiLoCo, DiLoCo
from triax.options.table import markdown
from triax.train.sections import WHOLE, TrainingFile

ROOT = Path(__file__).resolve().parents[1]

project = "triax"
author = "The triax authors"
version = release = triax.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
suppress_warnings = ["ref.python"]  # one class that is public in two packages

myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests/examples/test_notebooks.py runs them
html_math_renderer = "mathml"

default_role = "code"  # `x` in a docstring
smartquotes_action = "qe"  # quotes and dots, but no dashes: `--dtype` in a help text stays what one types
napoleon_use_ivar = True
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"triax {version}"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_sourcelink = html_show_copyright = False
html_copy_source = False
pygments_style, pygments_dark_style = "a11y-light", "a11y-dark"  # each token has a contrast of 4.5 at least

# An object that several packages have is described under the first of them, and named under the others.
PACKAGES = (
    "triax",
    *("triax.pipe", "triax.tensor_parallel", "triax.context", "triax.moe", "triax.zero", "triax.data", "triax.models"),
    *("triax.grid", "triax.methods", "triax.testing"),
    *("triax.compat.deepspeed", "triax.compat.horovod", "triax.compat.huggingface"),
)

# Subject -> beginnings of module names. A public name belongs to the first subject that has a beginning of its module.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "Layers and pipeline stages": ("triax.pipe.",),
    "Sharded layers": ("triax.tensor_parallel.",),
    "Grid and processes": ("triax.grid.",),
    "Engines": ("triax.engine.", "triax.zero.", "triax.inference."),
    "Options of an engine": ("triax.options.",),
    "Hugging Face": ("triax.models.huggingface.", "triax.compat.huggingface."),
    "Models and losses": ("triax.models.",),
    "Other": ("",),  # data, errors, packages
}


def setup(sphinx: Sphinx) -> None:
    """Register directives, the writer of formulas, the rewriting of docstrings and links, and words of the search."""
    sphinx.add_directive("public-names", PublicNames)
    sphinx.add_directive("engine-options", EngineOptionTables)
    sphinx.add_directive("commands", Commands)
    sphinx.add_directive("table-of", TableOf)
    sphinx.add_html_math_renderer("mathml", inline_renderers=(math, None), block_renderers=(math, None))
    sphinx.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before napoleon
    sphinx.connect("autodoc-process-docstring", join_names, priority=900)  # after it
    sphinx.connect("source-read", name_files_outside)
    sphinx.connect("doctree-read", index_symptoms)
    sphinx.connect("build-finished", list_links_outside)


# ---------------------------------------------------------------------------------------------------- the API


class PublicNames(SphinxDirective):
    """One entry for each public name of a package, from its docstring."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the entries in place of the directive."""
        return self.parse_text_to_nodes(public_names(self.arguments[0]), allow_section_headings=True)


def public_names(package: str) -> str:
    """Return the entries of a package's public names as Markdown; of ``triax`` under a heading for each subject."""
    homes: dict[int, str] = {}
    for each in PACKAGES:
        module = importlib.import_module(each)
        for name in sorted(module.__all__):
            homes.setdefault(id(getattr(module, name)), f"{each}.{name}")
        if each == package:
            break
    lines: list[str] = []
    subjects = _by_subject(module) if package == "triax" else {"": sorted(module.__all__)}
    for subject, names in subjects.items():
        title = [f"## {subject}", ""] if len(subjects) > 1 else []
        lines += [*title, "| name | |", "|---|---|"]
        lines += [f"| {{py:obj}}`{name} <{package}.{name}>` | {_summary(getattr(module, name))} |" for name in names]
        lines += ["", "```{eval-rst}"]
        for name in names:
            lines += _entry(getattr(module, name), f"{package}.{name}", homes)
        lines += ["```", ""]
    return "\n".join(lines)


def _by_subject(package: types.ModuleType) -> dict[str, list[str]]:
    """Return the public names of a package by ``SUBJECTS``, in the order of these."""
    found: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for name in sorted(package.__all__):
        value = getattr(package, name)
        place = f"{getattr(value, '__module__', package.__name__)}."
        found[next(subject for subject, start in SUBJECTS.items() if place.startswith(start))].append(name)
    return {subject: names for subject, names in found.items() if names}


def _entry(value: Any, path: str, homes: Mapping[int, str]) -> list[str]:
    """Return the entry of a public name as reStructuredText.

    Args:
        value: what has the name.
        path: the name with its package.
        homes: the name under which each value is described, by its id.
    """
    home = homes[id(value)] if callable(value) else path
    if isinstance(value, types.ModuleType):
        return [f".. py:data:: {path}", "", f"   {first_sentence(value)}", ""]
    if home != path:
        return [f".. py:data:: {path}", "", f"   Another name of :py:obj:`{home}`.", ""]
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:", ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {path}", ""]
    if callable(value):
        return [f".. py:data:: {path}", "", f"   A :py:obj:`{type(value).__name__}`.", ""]
    return [f".. py:data:: {path}", f"   :value: {value!r}", ""]


def _summary(value: Any) -> str:
    """Return the first sentence of a docstring for a cell of a table; of a value that has none of its own, nothing."""
    described = inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, types.ModuleType)
    text = inspect.cleandoc(value.__doc__ or "") if described else ""
    first = re.split(r"(?<! al)\.(?: |$)", " ".join(text.partition("\n\n")[0].split()))[0].replace("``", "`")
    words = first.split("`")  # every second one is code, which is not escaped
    return "`".join(word if number % 2 else _escaped(word) for number, word in enumerate(words))


def first_sentence(module: types.ModuleType) -> str:
    """Return the first line of a module's docstring; an adapter's module may have none."""
    return (module.__doc__ or f"The module ``{module.__name__}``.").strip().partition("\n")[0]


def as_restructured_text(sphinx: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Rewrite, in place, what docstrings have beside napoleon's sections: tables, and a section with a longer title."""
    fields = lines[:1] and lines[0].startswith("Alias for field number")  # what NamedTuple writes says nothing
    lines[:] = [] if fields else [*_sections(_tables(lines))]


def join_names(sphinx: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Join, in place, several names of one entry, which Sphinx would take for a type and a name."""
    for i, line in enumerate(lines):
        if field := re.match(r":(param|ivar) ([^:]+):", line):
            lines[i] = f":{field[1]} {field[2].replace(', ', '/')}:{line[field.end() :]}"


def _sections(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if title := re.fullmatch(r"(Attributes)(, .+):", line):
            yield from (f"{title[1]}{title[2]}, are listed below.", "", "Attributes:")
        else:
            yield line


def _tables(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        row = re.fullmatch(r"(\s*)\|(.+)\|", line)
        if row and not inside:
            yield from (f"{row[1]}.. list-table::", f"{row[1]}   :header-rows: 1", "")
        inside = row is not None
        if row is None:
            yield line
        elif not re.fullmatch(r"[\s|:-]+", row[2]):
            cells = [cell.strip() for cell in row[2].split("|")]
            yield from (f"{row[1]}   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(cells))
    if inside:
        yield ""


# ------------------------------------------------------------------------------------------------- the options


class EngineOptionTables(SphinxDirective):
    """A table of the options of each section of `EngineOptions`."""

    def run(self) -> list[nodes.Node]:
        """Parse the tables in place of the directive."""
        return self.parse_text_to_nodes(engine_options(), allow_section_headings=True)


def engine_options() -> str:
    """Return a table for each section of options, as Markdown; outer sections first."""
    places: dict[type[Options], str] = {EngineOptions: ""}
    for path, owner, found in walk(EngineOptions):
        for kind in sections_in(hints_of(owner)[found.name]):
            places.setdefault(kind, path)
    places |= dict.fromkeys((DiLoCo, AsyncDiLoCo), "local_updates")
    return "\n".join(line for kind, path in places.items() for line in _section_table(kind, path, places))


def _section_table(kind: type[Options], path: str, sections: Collection[type[Options]]) -> Iterator[str]:
    first = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0].replace("``", "`")
    place = f"`{path}`: " if path else ""
    main = f" Short form: the value of `{kind.MAIN}`." if kind.MAIN else ""
    yield from (f"## triax.{kind.__name__}", "", f"{place}{first}{main}", "", markdown(kind, sections, repr), "")


# ------------------------------------------------------------------------------------------------ the commands


class TableOf(SphinxDirective):
    """A table that a function makes."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse the table in place of the directive."""
        return self.parse_text_to_nodes(TABLES[self.arguments[0]]())


TABLES: dict[str, Callable[[], str]] = {
    "training-keys": partial(markdown, TrainingFile, WHOLE),
    "deepspeed-keys": deepspeed_keys,
    "deepspeed-names": deepspeed_names,
}


class Commands(SphinxDirective):
    """One entry for each command of `triax` and each of its options."""

    def run(self) -> list[nodes.Node]:
        """Parse the entries in place of the directive."""
        return self.parse_text_to_nodes(commands(), allow_section_headings=True)


EXAMPLES = read_table(command_line_file, "examples.toml")


def commands() -> str:
    """Return the entries of all commands as Markdown: what each is for, then its options, in the order of the help."""
    typed: Any = typer.main.get_command(command_line)
    lines: list[str] = []
    for title, names in GROUPS.items():
        lines += [f"## {title}", "", "| command | |", "|---|---|"]
        lines += [f"| [`triax {name}`](#triax-{name}) | {text} |" for name, text in names.items()]
        for name in names:
            lines += ["", f"(triax-{name})=", *_command(f"triax {name}", typed.commands[name])]
    return "\n".join(lines)


def _command(path: str, command: Any) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for name in sorted(command.commands):
            yield from _command(f"{path} {name}", command.commands[name])
        return
    context = typer.Context(command, info_name=path)
    yield from (f"### {path}", "", "```text", f"{path} {' '.join(command.collect_usage_pieces(context))}", "```", "")
    yield from (_escaped(command.help or ""), "", "```text", f"$ {EXAMPLES[path.partition(' ')[2]]}", "```", "")
    rows = [_row(param, context) for param in command.params if not getattr(param, "hidden", False)]
    if rows:
        yield from ("| argument or option | default | |", "|---|---|---|", *rows, "")


def _row(param: Any, context: typer.Context) -> str:
    argument = isinstance(param, TyperArgument)
    names = [param.name.upper()] if argument else [*param.opts, *param.secondary_opts]
    default = param.get_default(context, call=False)
    shown = "required" if param.required else "" if default in (None, False, (), []) or callable(default) else default
    text = " ".join(str(getattr(param, "help", None) or "").split())
    return f"| {' '.join(f'`{name}`' for name in names)} | {_escaped(str(shown))} | {_escaped(text)} |"


def _escaped(text: str) -> str:
    return re.sub(r"([|<*_\[\]{}$])", r"\\\1", text)


# ------------------------------------------------------------------------------------------------- the formulas


def math(writer: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers draw by themselves; MathJax would be fetched from the network."""
    writer.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


# --------------------------------------------------------------------------------------------------- the search

TROUBLESHOOTING = "guides/troubleshooting"
# Heading of that page -> what users type into the search of the site, which then shows the heading first.
SYMPTOMS = {
    "It hangs": ("it hangs", "hang", "deadlock", "timeout"),
    "NaN or infinity": ("nan", "loss is nan", "infinity"),
    "Out of memory": ("out of memory", "cuda out of memory", "oom"),
    "The loss differs": ("loss differs", "wrong loss"),
    "A slow step": ("slow step", "slow"),
    "It ends without a reason": ("killed", "sigkill"),
}


def index_symptoms(sphinx: Sphinx, doctree: nodes.document) -> None:
    """Add the entries of ``SYMPTOMS`` to the index of the search, which ranks an entry above titles and words."""
    if sphinx.env.docname == TROUBLESHOOTING:
        for section in list(doctree.findall(nodes.section)):
            title, place = section.next_node(nodes.title), section["ids"][0]
            words = SYMPTOMS.get(title.astext() if title is not None else "", ())
            section.insert(1, addnodes.index(entries=[("single", word, place, "main", None) for word in words]))


# ---------------------------------------------------------------------------------------------------- the links


def name_files_outside(sphinx: Sphinx, page: str, source: list[str]) -> None:
    """Turn links to the repository's files outside docs into their names, which the site does not hold.

    A link to a file that does not exist stays, and is reported.
    """
    folder = (ROOT / "docs" / page).parent

    def name(link: re.Match[str]) -> str:
        path = (folder / link[2].partition("#")[0]).resolve()
        outside = path.exists() and not path.is_relative_to(ROOT / "docs")
        if not outside:
            return link[0]
        relative = str(path.relative_to(ROOT))
        label = link[1].strip("`")
        return f"`{relative}`" if label in (relative, path.name) else f"{link[1]} (`{relative}`)"

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)", name, source[0])


def list_links_outside(sphinx: Sphinx, exception: Exception | None) -> None:
    """Write the addresses of other sites that the pages name to links.txt, sorted; none of them is fetched."""
    if exception is None:
        pages = (sphinx.env.get_doctree(page) for page in sphinx.env.found_docs)
        found = {node.get("refuri", "") for page in pages for node in page.findall(nodes.reference)}
        addresses = sorted(address for address in found if re.match("https?:", address))
        (Path(sphinx.outdir) / "links.txt").write_text("\n".join(addresses) + "\n", encoding="utf-8")
