"""Print conversations about Python's standard library, one a line: the questions are names, the answers docstrings.

python examples/recipes/conversations.py > conversations.jsonl
"""

import argparse
import collections
import importlib
import inspect
import json

NAMES = """
    argparse ast asyncio base64 bisect calendar collections configparser contextlib copy csv dataclasses
    datetime decimal difflib email.message enum fractions functools glob gzip heapq html http.client inspect io
    ipaddress itertools json logging math mimetypes multiprocessing os os.path pathlib pickle pprint queue
    random re secrets shlex shutil socket sqlite3 statistics string struct subprocess sys tarfile tempfile
    textwrap threading time timeit tokenize traceback types unittest urllib.parse urllib.request uuid warnings
    weakref xml.etree.ElementTree zipfile
"""


def main() -> None:
    """Print the conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    said: collections.Counter[str] = collections.Counter()
    for name in NAMES.split():
        module = importlib.import_module(name)
        for each in sorted(vars(module)):
            value = getattr(module, each)
            text = inspect.getdoc(value) if callable(value) and not each.startswith("_") else None
            if not text or said[text]:
                continue
            said[text] += 1
            question = {"role": "user", "content": f"What does {name}.{each} do?"}
            answer = {"role": "assistant", "content": text.partition("\n\n")[0]}
            print(json.dumps({"messages": [question, answer]}))


if __name__ == "__main__":
    main()
