"""``python -m triax.compat.deepspeed script.py ...``: run a script that imports deepspeed, as it is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ...grid.environment import local_place
from .modules import install


def main() -> None:
    """Call ``install()``, and run the script with its options, and with ``--local_rank`` if it has that option."""
    if len(sys.argv) < 2:
        sys.exit("no script was given: write python -m triax.compat.deepspeed script.py, and its options")
    install()
    del sys.argv[0]
    script = Path(sys.argv[0])
    if (rank_and_count := local_place()) is not None and "--local_rank" in script.read_text(encoding="utf-8"):
        sys.argv.insert(1, f"--local_rank={rank_and_count[0]}")
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
