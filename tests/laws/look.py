"""Check of the site, a run's report and a plan in a headless browser: `make look`, after `make docs`.

    python tests/laws/look.py                     all pages
    python tests/laws/look.py plan.html guides    the pages whose path has one of these texts

Each page is opened at the widths of a phone, a laptop and a wide screen, light and dark. look.js finds texts that are
cut or hard to read, boxes that scroll without a sign, missing pictures and white ones in the dark; here are links and
messages of the console. Each fault is a line: pages, widths and themes, element, numbers. Pictures of the pages are in
build/look/light and build/look/dark. The first page is look_faults.html, in which all kinds of faults must be found.

The browser is Chromium in the wheel of PyQt6-WebEngine, the extra `look`. Playwright and Selenium have better
interfaces, but their wheels hold no browser, and download one from another server than the package registry.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build"
SITE, LOOK = BUILD / "docs" / "html", BUILD / "look"
WIDTHS = {390: "phone", 1280: "laptop", 1920: "wide"}
HEIGHT, TALLEST = 900, 2400  # of the window, and of a picture
PLANTED = "look_faults.html"
KINDS = {"no viewport", "no dark theme", "page too wide", "no sign of scrolling", "cut beside an empty margin"}
KINDS |= {"text cut", "text wider than its box", "texts overlap", "contrast", "picture missing"}
KINDS |= {"white box in the dark", "dead link", "dead anchor", "console", "no such file"}
PREPARE = """
for (const each of document.querySelectorAll('details')) each.open = true;
const mark = document.body.appendChild(document.createElement('i'));
mark.style = 'position: fixed; left: 0; top: 0; width: 2px; height: 2px; z-index: 9999999';
"""
SIGN = 12  # difference from the ground, of 255, that is a sign at the edge of a scrolling box

# (kind, element, numbers) -> page -> places, such as "390 dark"
Faults = dict[tuple[str, str, str], dict[str, list[str]]]


# ------------------------------------------------------------------------------------------------- the pages


def make_pages() -> None:
    """Write a run's report, a comparison of two runs, and a plan, in build/look. The runs themselves are kept there."""
    run = {
        "runs": str(LOOK / "runs"),
        "model": {"preset": "mixtral-tiny"},
        "data": {"training": str(LOOK / "tokens"), "held_out": 0.05},
        "grid": {"pipe": 2, "data": 2, "expert": 2},
        "training": {"steps": 30},
        "batch": {"size": 16, "microbatch": 2},
        "evaluate": {"every": 10, "sequences": 16},
        "monitor": {"histograms": 10},
    }
    if not (LOOK / "runs" / "other" / "report.html").exists():
        shutil.rmtree(LOOK, ignore_errors=True)
        LOOK.mkdir(parents=True)
        (LOOK / "run.json").write_text(json.dumps(run))
        texts = sorted(str(path) for path in (HERE.parents[1] / "docs").glob("*.md"))
        triax("data", "tokenize", *texts, "--tokenizer", "bytes", "--split", "paragraph", "--output", LOOK / "tokens")
        triax("train", LOOK / "run.json", "name=pipeline")
        triax("train", LOOK / "run.json", "name=other", "schedule=gpipe")
    triax("report", LOOK / "runs/pipeline", "--output", LOOK / "report.html")
    triax("report", LOOK / "runs/pipeline", LOOK / "runs/other", "--output", LOOK / "comparison.html")
    triax("plan", "--model", "llama3-8b", "--gpus", "16", "--batch", "512", "--html", LOOK / "plan.html")


def triax(*words: object) -> None:
    """Run the command, and end with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "triax.cli.main", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"triax {' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def pages(wanted: list[str]) -> list[str]:
    """Return the paths of the pages under build, the page of planted faults first."""
    shutil.copy(HERE / PLANTED, LOOK)
    found = sorted([*SITE.rglob("*.html"), *LOOK.glob("*.html")])
    names = [str(path.relative_to(BUILD)) for path in found if "_static" not in path.parts and path.name != PLANTED]
    return [f"look/{PLANTED}", *(name for name in names if not wanted or any(text in name for text in wanted))]


class Files(SimpleHTTPRequestHandler):
    """Server of the folder build."""

    def __init__(self, missing: set[tuple[str, str]], *rest: Any, **named: Any) -> None:
        """Keep in ``missing`` each path that is not there, and the page that asked for it."""
        self.missing = missing
        super().__init__(*rest, **named)

    def send_error(self, code: int, *rest: Any) -> None:
        """Keep the path and the page."""
        if self.path != "/favicon.ico":  # which browsers ask for in any case
            self.missing.add((self.path, self.headers.get("Referer", "")))
        super().send_error(code, *rest)

    def log_message(self, *rest: Any) -> None:
        """Print nothing."""


# ----------------------------------------------------------------------------------------------- the browser


def look(theme: str, names: list[str], address: str) -> Faults:
    """Open the pages in this theme, and return their faults."""
    flags = "--no-sandbox --disable-gpu --log-level=3"
    dark = " --blink-settings=preferredColorScheme=0" if theme == "dark" else ""
    os.environ |= {
        "QT_QPA_PLATFORM": "offscreen",
        "QT_LOGGING_RULES": "*.warning=false",
        "QTWEBENGINE_CHROMIUM_FLAGS": flags + dark,
    }
    from PyQt6.QtCore import QEventLoop, QTimer, QUrl
    from PyQt6.QtGui import QImage
    from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineSettings
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    faults: Faults = defaultdict(lambda: defaultdict(list))
    links: dict[str, set[str]] = {}
    ids: dict[str, set[str]] = {}
    colors = (f"#ff{number:04x}" for number in itertools.count())
    script = (HERE / "look.js").read_text(encoding="utf-8")
    place = ""

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
            if level != QWebEnginePage.JavaScriptConsoleMessageLevel.InfoMessageLevel:
                faults["console", f"{Path(source).name}:{line}", message][name].append(place)

    def pause(milliseconds: int) -> None:
        loop = QEventLoop()
        QTimer.singleShot(milliseconds, loop.quit)
        loop.exec()

    def ask(text: str) -> Any:
        loop = QEventLoop()
        answers: list[Any] = []

        def take(value: Any) -> None:
            answers.append(value)
            loop.quit()

        view.page().runJavaScript(text, take)
        loop.exec()
        return answers[0]

    def resize(width: int, height: int) -> None:
        view.resize(width, height)
        while ask("[innerWidth, innerHeight]") != [width, height]:
            pause(10)

    def picture(top: float) -> tuple[QImage, float]:
        """Return the window, scrolled to this height of the page, and the height at which it begins."""
        # Chromium draws in another process: a mark of a new color in the corner shows that it has drawn this.
        color = next(colors)
        shown = ask(f"scrollTo({{top: {top}, behavior: 'instant'}}); mark.style.background = '{color}'; scrollY")
        while True:
            image = view.grab().toImage()
            if image.pixelColor(0, 0).name() == color:
                return image, shown
            pause(10)

    def has_sign(left: float, top: float, wide: float, high: float, ground: list[float]) -> bool:
        """Return True if most of the right edge of a scrolling box has another color than the box's ground."""
        image, shown = picture(top - 60)
        x, y = int(left + wide) - 3, top - shown
        rows = range(int(y + high / 4), int(y + 3 * high / 4))
        found = [image.pixelColor(x, row).getRgb() for row in rows if image.rect().contains(x, row)]
        marked = [color for color in found if max(abs(a - b) for a, b in zip(color, ground)) >= SIGN]
        return 2 * len(marked) > len(found)

    application = QApplication(["look"])
    view = QWebEngineView()
    view.setPage(Page(view))
    # As on a phone: a scroll bar is no sign there, and takes no room.
    view.settings().setAttribute(QWebEngineSettings.WebAttribute.ShowScrollBars, False)
    view.show()
    loaded = QEventLoop()
    view.loadFinished.connect(loaded.quit)
    for name in names:
        place = theme
        view.resize(1280, HEIGHT)
        view.load(QUrl(f"{address}/{name}"))
        loaded.exec()
        ask(PREPARE)
        for width in WIDTHS:
            place = f"{width} {theme}"
            resize(width, HEIGHT)
            found = json.loads(ask(script))
            for kind, element, numbers in found["faults"]:
                faults[kind, element, numbers][name].append(place)
            for element, left, top, wide, high, ground, numbers in found["boxes"]:
                if not has_sign(left, top, wide, min(high, HEIGHT - 60), ground):
                    faults["no sign of scrolling", element, numbers][name].append(place)
            resize(width, min(found["height"], TALLEST))
            file = LOOK / theme / f"{name.removesuffix('.html').replace('/', '-')}-{WIDTHS[width]}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture(0)[0].save(str(file))
        links[name], ids[name] = set(found["links"]), set(found["ids"])
    for name, targets in links.items():
        for target in targets:
            path, anchor = map(unquote, urldefrag(target.removeprefix(f"{address}/")))
            if "://" in path or path.startswith(("mailto:", "javascript:", "data:")):
                continue
            if not (BUILD / path).is_file():
                faults["dead link", path, ""][name].append(theme)
            elif anchor and path in ids and anchor not in ids[path]:
                faults["dead anchor", f"{path}#{anchor}", ""][name].append(theme)
    view.close()
    application.quit()
    return faults


# ------------------------------------------------------------------------------------------------ the faults


def main() -> int:
    """Look at the pages, print their faults, and return 1 if there are any."""
    if sys.argv[1:2] == ["--theme"]:  # a process for each theme: Chromium takes it when it starts
        theme, path, address = sys.argv[2:]
        found = look(theme, json.loads(Path(path).read_text()), address)
        Path(path).write_text(json.dumps([[*key, places] for key, places in found.items()]))
        return 0
    make_pages()
    names = pages(sys.argv[1:])
    missing: set[tuple[str, str]] = set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, missing, directory=str(BUILD)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    faults: Faults = defaultdict(lambda: defaultdict(list))
    files = {theme: LOOK / f"{theme}.json" for theme in ("light", "dark")}
    browsers = []
    for theme, file in files.items():
        file.write_text(json.dumps(names))
        browsers.append(subprocess.Popen([sys.executable, __file__, "--theme", theme, str(file), address]))
    codes = [browser.wait() for browser in browsers]
    if any(codes):
        sys.exit("the browser ended with an error")
    for file in files.values():
        for kind, element, numbers, places in json.loads(file.read_text()):
            for name, where in places.items():
                faults[kind, element, numbers][name] += where
    for asked, page in missing:
        faults["no such file", asked, ""][page.removeprefix(f"{address}/")].append("any")
    return report(faults, len(names))


def report(faults: Faults, count: int) -> int:
    """Print a line for each fault, and return 1 if there are any, or if a planted one was not found."""
    planted = {kind for (kind, _, _), places in faults.items() if f"look/{PLANTED}" in places}
    lines = []
    for (kind, element, numbers), places in sorted(faults.items()):
        names = [name for name in places if name != f"look/{PLANTED}"]
        if not names:
            continue
        where = sorted({place for name in names for place in places[name]})
        more = f" and {len(names) - 3} more pages" if len(names) > 3 else ""
        lines.append(f"{kind}: {', '.join(names[:3])}{more} [{', '.join(where)}] {element} {numbers}")
    print(*lines, sep="\n")
    unfound = KINDS - planted
    if unfound:
        print(f"{PLANTED} has faults that were not found: {', '.join(sorted(unfound))}")
    print(f"{len(lines)} faults on {count - 1} pages; pictures are in {LOOK}")
    return 1 if lines or unfound else 0


if __name__ == "__main__":
    sys.exit(main())
