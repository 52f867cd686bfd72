"""The command line. ``main`` is the console script; the commands are in ``app`` and need the ``cli`` extra.

Owns nothing but the way in: this module imports no library beyond Python's own, so that a missing one is a sentence
and not a traceback.
"""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command given in ``sys.argv``; the exit status is the command's."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"hf-paged: the command line needs {' and '.join(missing)}: pip install 'hf-paged[cli]'")
    from hf_paged.cli.app import app

    app()
