"""Several continuations of one prompt, the most likely first. The prompt is computed once and its blocks are shared.

python examples/parallel_sampling.py "Once upon a time" --n 4 --temperature 0.8 --seed 1
"""

from __future__ import annotations

import argparse

from hf_paged import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="The best way to spend a rainy day is")
    parser.add_argument("--model", default="demo", help="a folder or a hub id (default: the small demo model)")
    parser.add_argument("--n", type=int, default=4, help="continuations")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--max-tokens", type=int, default=30)
    parser.add_argument("--seed", type=int, help="makes the continuations reproducible")
    args = parser.parse_args()

    llm = LLM(args.model)
    params = SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
        logprobs=0,  # of the chosen tokens, for their sum
    )
    output = llm.generate(args.prompt, params)[0]
    for completion in sorted(output.outputs, key=lambda c: -(c.cumulative_logprob or 0.0)):
        print(f"--- {completion.index}: log-probability {completion.cumulative_logprob:.1f}")
        print(args.prompt + completion.text)
    stats = llm.stats()
    print(f"--- {stats['computed_tokens']} tokens computed for {args.n} x {len(output.prompt_token_ids)} of the prompt")


if __name__ == "__main__":
    main()
