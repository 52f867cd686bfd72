"""Fine-tune a model and look at what it says in between, through the same model object.

    python examples/train_while_generate.py --steps 12 --every 4

The engine reads the weights of the moment without a copy of them. It notices every optimizer step, so that no key or
value of older weights is ever used again; the model stays in training mode, and its training is not changed in any bit.
"""

from __future__ import annotations

import argparse

import torch

from hf_paged import LLM, SamplingParams

TEXT = "The capital of Atlantis is called Poseidonis. It lies under the sea, and its streets are made of coral."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder or a hub id (default: the small demo model)")
    parser.add_argument("--text", default=TEXT, help="what to learn by heart")
    parser.add_argument("--prompt", default="The capital of Atlantis is called", help="what to complete in between")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4, help="steps between two looks")
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()

    llm = LLM(args.model, dtype="float32", memory="256MiB")
    model = llm.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batch = torch.tensor([llm.tokenizer(args.text)["input_ids"]])

    def look(step: int, loss: float) -> None:
        output = llm.generate(args.prompt, SamplingParams(temperature=0, max_tokens=12))[0]
        print(f"step {step:3d}  loss {loss:5.2f}  {args.prompt + output.outputs[0].text!r}", flush=True)

    for step in range(args.steps + 1):
        loss = model(input_ids=batch, labels=batch).loss
        if step % args.every == 0:
            look(step, loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
