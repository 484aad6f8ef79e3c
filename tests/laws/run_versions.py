"""Run the tests on another Python and torch than those of `make test`, in an environment of its own.

    python tests/laws/run_versions.py 3.13:2.12.0             Python 3.13 (python3.13 on the path) with torch 2.12.0
    python tests/laws/run_versions.py 3.11:oldest -k zero     the oldest releases that pyproject.toml allows

The environment is build/versions/<Python>-<torch> and is made once. `make test-versions` runs this for all versions of
docs/versions.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# "oldest" asks for the oldest releases of the core's packages and of the packages of these extras. It does not for the
# other extras: trl, which only the tests need, needs newer ones.
PARTS = ("plot", "tensorboard", "wandb", "hf")


def constraints(torch: str) -> list[str]:
    """Return lines of a constraints file: those of constraints.txt, with another torch or the oldest releases."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    if torch != "oldest":
        # Each release of torch names the releases of setuptools that it takes.
        return [f"torch=={torch}", *(line for line in lines if not line.startswith(("torch==", "setuptools==")))]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for part in PARTS for each in project["optional-dependencies"][part])]
    oldest = dict(pair for each in wanted for pair in re.findall(r"^([\w.-]+).*?>=([\w.]+)", each))
    return [f"{name}=={version if '.' in version else version + '.0'}.*" for name, version in oldest.items()]


def environment(python: str, torch: str) -> Path:
    """Return the Python of the environment, which is made if it is missing."""
    folder = ROOT / "build" / "versions" / f"{python}-{torch}"
    made = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([f"python{python}", "-m", "venv", "--clear", str(folder)], check=True)
        (folder / "constraints.txt").write_text("\n".join(constraints(torch)) + "\n")
        packages = [
            "-c",
            str(folder / "constraints.txt"),
            "-e",
            f"{ROOT}[plot,tensorboard,wandb,hf,eval,data,remote,test]",
        ]
        subprocess.run([str(made), "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "installed").touch()
    return made


def main() -> int:
    """Run the tests, and return pytest's exit status."""
    python, _, torch = sys.argv[1].partition(":")
    return subprocess.run([str(environment(python, torch)), "-m", "pytest", *sys.argv[2:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
