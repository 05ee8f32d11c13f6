"""`python -m tests.fuzz.guided TARGET [libFuzzer's arguments]`: one target under atheris, until it ends the process."""

from __future__ import annotations

import importlib
import logging
import sys


def main() -> None:
    import atheris

    name, rest = sys.argv[1], sys.argv[2:]
    with atheris.instrument_imports(include=["gateway", "indexer", "scorer"]):
        module = importlib.import_module(f"tests.fuzz.targets.{name}")
    logging.disable(logging.CRITICAL)
    atheris.Setup([sys.argv[0], *rest], module.fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
