"""Chat with a model on the terminal; answers appear as they are generated. An empty line or Ctrl-D ends it.

    python examples/chat.py --temperature 0.7

Every turn begins with all the turns before it, whose keys and values are still in the cache: only what is new is
computed. ``--stats`` shows how much that was.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from hf_paged import AsyncLLM, SamplingParams


async def chat(args: argparse.Namespace) -> None:
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    async with AsyncLLM(args.model) as llm:
        while question := await asyncio.to_thread(ask):
            messages.append({"role": "user", "content": question})
            shown = ""
            async for output in llm.chat(messages, params):
                text = output.outputs[0].text
                print(text[len(shown) :], end="", flush=True)
                shown = text
            print()
            if args.stats:
                print(f"[{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached]")
            messages.append({"role": "assistant", "content": shown})


def ask() -> str:
    print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder or a hub id (default: the small demo model)")
    parser.add_argument("--system", default="", help="instructions for the whole conversation")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=200, help="length of an answer at most")
    parser.add_argument("--stats", action="store_true", help="show how much of each prompt was cached")
    asyncio.run(chat(parser.parse_args()))


if __name__ == "__main__":
    main()
