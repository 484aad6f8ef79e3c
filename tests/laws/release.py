"""Program: the wheel in an empty environment, and the version in every place: `make release-check` runs it at its end.

    python tests/laws/release.py

It builds the wheel of the last commit, makes an environment with this Python and nothing else, and installs the wheel
with its dependencies. There it runs what a new user types first: the command's version, a schedule, a recipe, a
project, the demo, and the first program on one and on two processes, which must print the same losses.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.paths import ROOT
from support.readme_blocks import programs
from support.versions import versions


def run(*command: object, cwd: Path) -> str:
    """Run a command; return what it prints, or end with what it said."""
    words = [str(word) for word in command]
    print("==", *words, flush=True)
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Check the versions, then build, install and use the wheel."""
    found = versions()
    if len(set(found.values())) > 1:
        sys.exit(f"the version is not the same everywhere: {found}")
    version = found["pyproject.toml"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # From a copy: a build in the checkout would take up what an earlier one left there.
        run("git", "-C", ROOT, "archive", "--output", folder / "commit.tar", "HEAD", cwd=folder)
        shutil.unpack_archive(folder / "commit.tar", folder / "commit", filter="data")
        build = ("-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder)
        run(sys.executable, *build, folder / "commit", cwd=folder)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "env", with_pip=True)
        commands = folder / "env" / "bin"
        install = ("-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
        run(commands / "python", *install, cwd=folder)
        said = run(commands / "triax", "--version", cwd=folder)
        if said.strip() != f"triax {version}":
            sys.exit(f"the installed command says {said.strip()}, not triax {version}")
        for words in (("schedule", "zb-v"), ("recipe", "pretrain"), ("new", "first"), ("demo",)):
            run(commands / "triax", *words, cwd=folder)
        script, source = next(iter(programs((ROOT / "docs" / "start" / "first-run.md").read_text()).items()))
        (folder / script).write_text(source)
        alone = run(commands / "python", script, cwd=folder)
        together = run(commands / "torchrun", "--nproc-per-node", "2", script, "2", "1", "1", cwd=folder)
        if alone != together or "step" not in alone:
            sys.exit(f"one process printed\n{alone}and two\n{together}")
    print(f"triax {version}: the wheel installs into an empty environment and works")


if __name__ == "__main__":
    main()
