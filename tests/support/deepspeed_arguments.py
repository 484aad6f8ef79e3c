"""Command line of DeepSpeedExamples' programs."""

from __future__ import annotations

import argparse
from typing import Any

import triax.compat.deepspeed as deepspeed


def arguments(*given: str) -> Any:
    """Parse what a launcher passes, as most of the scripts do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=12)
    return deepspeed.add_config_arguments(parser).parse_args(given)
