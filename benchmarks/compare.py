"""All peers on W1-W5, as the repository's own results are made.

    python benchmarks/compare.py [any option of `hf-paged bench`]

The same as ``hf-paged bench``, with results in benchmarks/results/local; those worth keeping are moved one folder up.
``make bench-peers`` installs the other engines, and ``--only W3 --peers hf-paged,vllm`` picks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hf_paged.cli import main

OUT = Path(__file__).parent / "results" / "local"

if __name__ == "__main__":
    given = sys.argv[1:]
    sys.argv[1:] = ["bench", *([] if "--out" in given else ["--out", str(OUT)]), *given]
    main()
