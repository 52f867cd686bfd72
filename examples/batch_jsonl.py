"""Complete every prompt of a JSONL file: one object a line in, the same object with its completion out.

    python examples/batch_jsonl.py prompts.jsonl completions.jsonl --max-tokens 64

A line holds ``prompt`` (a text) or ``messages`` (a chat), and may hold sampling parameters of its own, such as
``{"prompt": "Once upon a time", "temperature": 0.8, "max_tokens": 100}``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from hf_paged import LLM, SamplingParams

OPTIONS = {field.name for field in dataclasses.fields(SamplingParams)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="demo", help="a folder or a hub id (default: the small demo model)")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    lines = [json.loads(line) for line in args.input.read_text(encoding="utf-8").splitlines() if line.strip()]
    llm = LLM(args.model)
    outputs = llm.generate(
        [line.get("messages") or line["prompt"] for line in lines],
        [params_of(line, args.max_tokens) for line in lines],
        use_tqdm=True,
    )
    with args.output.open("w", encoding="utf-8") as file:
        for line, output in zip(lines, outputs, strict=True):
            first = output.outputs[0]
            found = {"completion": first.text, "finish_reason": first.finish_reason}
            if output.error is not None:
                found["error"] = str(output.error)
            file.write(json.dumps({**line, **found}, ensure_ascii=False) + "\n")


def params_of(line: dict[str, Any], max_tokens: int) -> SamplingParams:
    own = {name: value for name, value in line.items() if name in OPTIONS}
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **own})


if __name__ == "__main__":
    main()
