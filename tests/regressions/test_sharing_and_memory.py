"""Case 7 and the memory promises: prompts of beams and samples are held once, padding never enters a block.

https://github.com/huggingface/transformers/issues/45563
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.generation.state import BatchState
from tests import zoo
from tests.regressions.helpers import ids, left_padded, paged, registered, stock

pytestmark = pytest.mark.versions


class Peak:
    """A logits processor that watches how many blocks calls of a model hold."""

    def __init__(self, model: Any) -> None:
        self.model, self.blocks = model, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stats = hf_paged.cache_stats(self.model)
        self.blocks.append(stats.used_blocks)
        return scores


def test_samples_share_their_prompt_and_copy_on_write() -> None:
    model, prompt = zoo.build("llama"), ids(1, 8)  # exactly two blocks of 4
    with registered(prefix_caching=False):
        torch.manual_seed(3)
        want = stock(model, prompt, do_sample=True, num_return_sequences=3)
        torch.manual_seed(3)
        peak = Peak(model)
        got = paged(model, prompt, do_sample=True, num_return_sequences=3, logits_processor=[peak])
        assert torch.equal(got, want) and len({tuple(row) for row in got.tolist()}) == 3
        assert peak.blocks[0] == 2, "after prefill the prompt is held once"
        assert peak.blocks[1] == 2 + 3, "then each sample has one block of its own"


def test_eight_beams_hold_a_512_token_prompt_once() -> None:
    model, prompt = zoo.fresh("gpt_neox"), ids(1, 512)
    model.config.max_position_embeddings = 1024
    with registered(block_size=16):
        peak = Peak(model)
        paged(model, prompt, num_beams=8, max_new_tokens=12, logits_processor=[peak])
        assert peak.blocks[0] == 32
        assert max(peak.blocks) <= 32 + 8


@pytest.mark.parametrize(("name", "after"), [("llama", 6), ("deepseek_v3", 18)])
def test_rows_alike_are_merged_once_the_model_is_known_to_be_native(
    name: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix kernel may give equal rows different last bits, which a gathered model has to keep, as stock does."""
    held, end_prompt = [], BatchState.end_prompt

    def spy(self: BatchState, merge: bool) -> None:
        before = self.num_blocks
        end_prompt(self, merge)
        held.append((before, self.num_blocks))

    monkeypatch.setattr(BatchState, "end_prompt", spy)
    model, prompt = zoo.fresh(name), ids(1, 21)
    want = stock(model, prompt, num_beams=3)
    with registered(prefix_caching=False):
        for _ in range(2):
            assert torch.equal(paged(model, prompt, num_beams=3), want)
    assert held == [(18, after), (after, after)]


def test_rows_alike_share_from_the_start_where_memory_is_short() -> None:
    model, prompt = zoo.fresh("llama"), ids(1, 40)
    want = stock(model, prompt, num_beams=4)
    with registered(memory=None, num_blocks=10 + 3 * 4, prefix_caching=False):  # the prompt once, and what beams add
        assert torch.equal(paged(model, prompt, num_beams=4), want)  # nothing is known of the model yet
        assert torch.equal(paged(model, prompt, num_beams=4), want)


def test_a_left_padded_batch_holds_no_padding() -> None:
    lengths = [20 + int(i * 980 / 15) for i in range(16)]
    model = zoo.build("gpt_neox")
    with registered(block_size=16, memory="64MiB"):
        peak = Peak(model)
        paged(model, **left_padded(lengths), max_new_tokens=1, logits_processor=[peak])
        assert peak.blocks[0] <= sum(math.ceil(n / 16) for n in lengths)


def test_a_default_call_on_a_tiny_model_adds_less_than_64_mb() -> None:
    """transformers' own paged call takes 60 % of the machine's memory for the same work."""
    script = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
import hf_paged
from hf_paged.generation.state import BatchState
from tests import zoo
model = zoo.build("llama")
prompt = torch.randint(3, zoo.VOCAB, (4, 30))
model.generate(prompt, max_new_tokens=8, do_sample=False)   # warm: code pages, thread pools
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
hf_paged.register()
before = rss()
model.generate(prompt, max_new_tokens=8, do_sample=False, cache_implementation="paged")
model.generate(prompt, max_new_tokens=8, do_sample=False, cache_implementation="paged")
print(rss() - before)
"""
    root = str(__import__("pathlib").Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 64e6


def test_limited_address_space_makes_the_default_pool_smaller() -> None:
    script = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch, hf_paged
torch.set_num_threads(1)
from tests import zoo
hf_paged.register()
models = [zoo.fresh("llama") for _ in range(4)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)
prompt = torch.randint(3, zoo.VOCAB, (2, 9))
for model in models:
    out = model.generate(prompt, max_new_tokens=4, do_sample=False, cache_implementation="paged")
    assert torch.equal(out, model.generate(prompt, max_new_tokens=4, do_sample=False))
print("fine")
"""
    root = str(__import__("pathlib").Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["fine"], done.stderr[-2000:]


def test_blocks_return_when_the_result_is_dropped() -> None:
    model, prompt = zoo.build("llama"), ids(2, 9)
    with registered(prefix_caching=False):
        result = paged(model, prompt, return_dict_in_generate=True)
        assert hf_paged.cache_stats(model).used_blocks > 0, "the caller owns the returned cache"
        result.past_key_values.free()
        assert hf_paged.cache_stats(model).used_blocks == 0
        result.past_key_values.free()
        result = paged(model, prompt, return_dict_in_generate=True)
        del result
        assert hf_paged.cache_stats(model).used_blocks == 0


def test_a_failing_processor_leaks_nothing() -> None:
    model, prompt = zoo.build("llama"), ids(2, 9)

    def explode(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 12:
            raise RuntimeError("boom")
        return scores

    with registered(prefix_caching=False):
        with pytest.raises(RuntimeError, match="boom"):
            paged(model, prompt, logits_processor=[explode])
        assert hf_paged.cache_stats(model).used_blocks == 0
        assert torch.equal(paged(model, prompt), stock(model, prompt))
