"""Cases 7, 8, 9, 14, 15 and 18: what requests share, what is kept for the next one, and whose it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged import LLM, SamplingParams
from hf_paged.cache.manager import KVCacheManager
from hf_paged.errors import InternalError
from tests import zoo
from tests.engine.test_llm_parity import alone, check_clean
from tests.regressions.helpers import ids

BS = 4


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return ids(1, length, seed=seed)[0].tolist()


def completed(llm: LLM, tokens: list[int], new: int = 4, **options: Any) -> Any:
    """The output of one greedy request, which has to be what stock generates."""
    output = llm.generate([tokens], greedy(new), **options)[0]
    assert output.outputs[0].token_ids == alone(llm.model, tokens, max_new_tokens=new)
    return output


# -- case 7 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 8, 9])
def test_completions_of_a_prompt_share_its_blocks(length: int) -> None:
    """Case 7: each completion of one prompt copied its state as a whole.

    https://github.com/huggingface/transformers/issues/45563
    """
    llm, tokens = LLM(zoo.build("llama"), block_size=BS, num_blocks=64), prompt(length)
    stream = llm.stream(tokens, SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=1))
    next(stream)
    assert llm.stats()["computed_tokens"] == length, "the prompt is computed once"
    whole, copies = length // BS, 2 if length % BS else 0
    next(stream)
    tables = [r.table.blocks for r in llm.core.scheduler.running if r.table is not None]
    assert len(tables) == 3 and all(t[:whole] == tables[0][:whole] for t in tables)
    assert all(llm.core.manager._pool.holds(block) == 3 for block in tables[0][:whole])
    own = [block for t in tables for block in t[whole:]]
    assert len(set(own)) == len(own), "what they write is their own"
    # in the tree a prompt may end inside a block, which its writer then copies as well
    assert copies <= llm.stats()["cow_copies"] <= copies + 1
    *_, output = stream
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    check_clean(llm)


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_end_of_one_completion_takes_nothing_from_the_others(length: int, prefix_caching: bool) -> None:
    """Case 7: blocks of siblings were freed with the first of them that ended.

    https://github.com/huggingface/transformers/issues/45563
    """
    model, tokens = zoo.build("llama"), prompt(length)
    llm = LLM(model, block_size=BS, num_blocks=64, prefix_caching=prefix_caching)
    params = {"n": 3, "temperature": 1.0, "max_tokens": 20, "seed": 1, "logprobs": 0}
    whole = [c.token_ids for c in llm.generate(tokens, SamplingParams(**params))[0].outputs]
    stop = whole[1][2]
    output = llm.generate([tokens, prompt(12, seed=5)], SamplingParams(**params, stop_token_ids=[stop]))[0]
    ends = [w[: w.index(stop) + 1] if stop in w else w for w in whole]
    assert [c.token_ids for c in output.outputs] == ends
    assert len(ends[1]) <= 3 and max(map(len, ends)) > 10, "one of them ends long before another"
    for completion in output.outputs:  # and each read its own keys to its end
        with torch.no_grad():
            rows = model(torch.tensor([[*tokens, *completion.token_ids]])).logits[0].log_softmax(-1)
        want = [float(rows[length - 1 + i, t]) for i, t in enumerate(completion.token_ids)]
        got = [found[t].logprob for found, t in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert got == pytest.approx(want, abs=1e-4)
    check_clean(llm)


# -- case 8 ------------------------------------------------------------------------------------------------------------


def test_a_prefix_is_still_there_when_the_cache_is_nearly_full() -> None:
    """Case 8: transformers 5.24 evicts every cached block at once when less than a margin of 15 % is free."""
    llm = LLM(zoo.build("llama"), block_size=BS, num_blocks=100)
    head = prompt(20, seed=99)
    completed(llm, [*head, 5])
    seed = 0
    while llm.stats()["cached_blocks"] < 86:
        completed(llm, prompt(12, seed=seed))
        seed += 1
    assert completed(llm, [*head, 6]).num_cached_tokens == 20
    assert llm.stats()["evicted_blocks"] == 0
    check_clean(llm)


def test_only_what_was_not_used_for_longest_gives_way() -> None:
    """Case 8: a prefix in use stays through several times the pool of other prompts, and the oldest of those go."""
    llm = LLM(zoo.build("llama"), block_size=BS, num_blocks=40)
    head = prompt(20, seed=99)
    completed(llm, [*head, 5])
    for seed in range(24):
        completed(llm, prompt(12, seed=seed))
        assert completed(llm, [*head, 7 + seed]).num_cached_tokens >= 20, f"the prefix was lost after {seed} prompts"
    stats = llm.stats()
    assert stats["evicted_blocks"] > 40
    assert stats["cached_blocks"] > 30, "more was evicted than had to be"
    assert completed(llm, prompt(12, seed=23)).num_cached_tokens == 11
    assert completed(llm, prompt(12, seed=0)).num_cached_tokens == 0
    check_clean(llm)


def test_models_with_sliding_windows_share_prefixes() -> None:
    """Case 8: one layer with a window took prefix sharing from the whole model."""
    for name in ("mistral", "gemma3"):
        llm = LLM(zoo.build(name), block_size=BS, num_blocks=64)
        head = prompt(30, seed=1)
        completed(llm, [*head, 5])
        assert completed(llm, [*head, 6]).num_cached_tokens == 30


# -- case 9 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("shared", [1, 15, 100])
def test_a_prefix_shorter_than_a_block_is_reused(block_size: int, shared: int) -> None:
    """Case 9: pages of 256 tokens, or blocks of 2048, gave no hit for prompts of 100 to 400 tokens.

    https://github.com/vllm-project/vllm/issues/53749, https://github.com/jundot/omlx/issues/3443
    """
    llm = LLM(zoo.build("llama"), block_size=block_size, num_blocks=1024 // block_size)
    head = prompt(shared, seed=3)
    completed(llm, [*head, 5, 9, 9])
    assert completed(llm, [*head, 7, 9, 9]).num_cached_tokens == shared
    assert llm.stats()["min_reusable_prefix"] == 1
    check_clean(llm)


# -- case 14 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12])
def test_a_fully_cached_prompt_computes_its_last_token_and_nothing_else(length: int) -> None:
    """Case 14: a prompt of whole blocks that is cached to its end left nothing to compute, and no logits.

    https://github.com/vllm-project/vllm/issues/52897, https://github.com/GeeeekExplorer/nano-vllm/issues/20,
    https://github.com/Wenyueh/MinivLLM/pull/87
    """
    llm, tokens = LLM(zoo.build("llama"), block_size=BS, num_blocks=64), prompt(length)
    params = greedy(3, logprobs=5)
    outputs = [llm.generate([tokens], params)[0] for _ in range(3)]
    assert [o.num_cached_tokens for o in outputs] == [0, length - 1, length - 1]
    assert [o.outputs[0].token_ids for o in outputs] == [alone(llm.model, tokens, max_new_tokens=3)] * 3
    cold = outputs[0].outputs[0].logprobs
    for output in outputs[1:]:
        for a, b in zip(cold, output.outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            assert all(b[token].logprob == pytest.approx(a[token].logprob, abs=1e-4) for token in a)
    # the prompt once, then only its last token; the last generated token is never run
    assert llm.stats()["computed_tokens"] == length + 2 + 2 * (1 + 2)
    check_clean(llm)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_blocks_that_others_read_are_never_written(length: int) -> None:
    """Case 14: what runs on behind a shared block must copy it first, or the other sequence reads foreign tokens.

    https://github.com/vllm-project/vllm/issues/52897
    """
    llm, tokens = LLM(zoo.build("llama"), block_size=BS, num_blocks=64), prompt(length)
    completed(llm, tokens, 2)
    # all at once: two that go on alike, two that diverge in the last shared block, one that ends inside it
    batch = [tokens, tokens, [*tokens[:-1], 11, 12], [*tokens[:-2], 13, 14], tokens[:-1]]
    for _ in range(2):
        outputs = llm.generate(batch, greedy(10))
        assert [o.outputs[0].token_ids for o in outputs] == [alone(llm.model, p) for p in batch]
        assert all(o.num_cached_tokens >= length - 2 for o in outputs)
    assert llm.stats()["cow_copies"] > 0
    check_clean(llm)


# -- case 15 -----------------------------------------------------------------------------------------------------------


def test_salts_never_meet() -> None:
    """Case 15: prefixes are told from outside by their timing; requests with another salt must not share them.

    https://github.com/vllm-project/vllm/pull/39082 (CVE-2025-46570), https://github.com/vllm-project/vllm/issues/44701
    """
    llm, tokens = LLM(zoo.build("llama"), block_size=BS, num_blocks=200), prompt(12)
    for salt in (None, "", "a", "b", "None", "('salt', None)"):
        assert completed(llm, tokens, salt=salt).num_cached_tokens == 0, f"salt {salt!r} met another's prefix"
        assert completed(llm, tokens, salt=salt).num_cached_tokens == 11
    check_clean(llm)


def test_an_adapter_and_a_salt_of_the_same_name_are_different_things() -> None:
    """Case 15: the adapter "X" without a salt shared prefixes with no adapter and the salt "X".

    https://github.com/vllm-project/vllm/issues/44701
    """
    model = zoo.fresh("llama")
    adapted = _with_adapter(model, seed=1)
    llm, tokens = LLM(model, block_size=BS, num_blocks=200), prompt(12)
    with_adapter = completed(llm, tokens)
    adapted.base_model.disable_adapter_layers()
    without = completed(llm, tokens, salt="X")
    assert with_adapter.outputs[0].token_ids != without.outputs[0].token_ids, "the adapter must matter"
    assert (with_adapter.num_cached_tokens, without.num_cached_tokens) == (0, 0)
    adapted.base_model.enable_adapter_layers()
    completed(llm, tokens, salt="X")
    completed(llm, tokens)
    check_clean(llm)


def test_an_adapter_loaded_again_under_its_name_is_another_one() -> None:
    """Case 15: prefixes of an adapter's old weights were found under its name after it was loaded again.

    https://github.com/vllm-project/vllm/pull/42495
    """
    model = zoo.fresh("llama")
    adapted = _with_adapter(model, seed=1)
    llm, tokens, found = LLM(model, block_size=BS, num_blocks=200), prompt(12), []
    for seed in (1, 2):
        if seed > 1:
            adapted.delete_adapter("X")
            adapted.add_adapter("X", _lora())
            adapted.set_adapter("X")
            _fill(model, seed)
        output = completed(llm, tokens)
        assert output.num_cached_tokens == 0
        assert completed(llm, tokens).num_cached_tokens == 11
        found.append(output.outputs[0].token_ids)
    assert found[0] != found[1], "the adapters must differ"
    check_clean(llm)


def _lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")


def _with_adapter(model: Any, seed: int) -> Any:
    """PEFT's wrapper around the model, which now has an active adapter "X" with random weights."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, _lora(), adapter_name="X")
    _fill(model, seed)
    return adapted.eval()


def _fill(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def test_equal_tokens_under_tagged_namespaces_never_meet() -> None:
    """Case 15, for image tokens: all placeholders are one id, so the content's hash and place are part of the key.

    https://github.com/vllm-project/vllm/pull/44706
    """
    manager, tokens = KVCacheManager(65, BS), prompt(12)
    namespaces = [
        (("adapter", "X", 1), ("salt", None)),
        (("adapter", "X", 2), ("salt", None)),
        (("adapter", None, 0), ("salt", "X")),
        (("mm", "cat", 3), ("salt", None)),
        (("mm", "dog", 3), ("salt", None)),
        (("mm", "cat", 4), ("salt", None)),
    ]
    for namespace in namespaces:
        match = manager.match_prefix(namespace, tokens)
        assert match.num_tokens == 0, f"{namespace} met another namespace's prefix"
        table = manager.adopt(match, 0)
        manager.append(table, len(tokens))
        manager.commit(namespace, tokens, table)
        manager.free(table)
    for namespace in namespaces:
        match = manager.match_prefix(namespace, tokens)
        assert match.num_tokens == len(tokens)
        manager.release(match)
    manager.check_invariants()


# -- case 18 -----------------------------------------------------------------------------------------------------------


def test_a_prefix_stored_twice_at_once_is_counted_once() -> None:
    """Case 18: two requests computed the same prefix side by side; the second one's blocks were lost, or freed twice.

    https://github.com/huggingface/text-generation-inference/issues/2871
    """
    llm, tokens = LLM(zoo.build("llama"), block_size=BS, num_blocks=64), prompt(11)  # too short to wait for a sibling
    for _ in range(3):
        outputs = llm.generate([tokens] * 5, greedy(6))
        assert [o.outputs[0].token_ids for o in outputs] == [alone(llm.model, tokens, max_new_tokens=6)] * 5
        check_clean(llm)
    stats = llm.stats()
    assert stats["cached_blocks"] == -(-(11 + 5) // BS), "only one copy of what all of them computed is kept"
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["num_blocks"] - 1


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_prompt_given_up_half_way_leaves_only_what_was_computed(overlap: bool) -> None:
    """Case 18: blocks that were reserved but never computed were found by the next request with that prefix.

    https://github.com/huggingface/text-generation-inference/pull/2489
    """
    model, tokens = zoo.build("llama"), prompt(40)
    llm = LLM(model, block_size=BS, num_blocks=64, max_num_batched_tokens=8, overlap=overlap)
    first = llm.stream([9, 8, 7], greedy(30))
    next(first)
    group = llm.frontend.add(tokens, greedy(4), 0, None)  # no stream can be closed before its first token
    next(first)
    next(first)
    part = next(iter(group.parts.values()))
    assert 0 < part.request.num_computed < 40 and part.request.num_output == 0, "it is in the middle of its prompt"
    computed = part.request.num_computed
    llm.frontend.drop(group)
    llm.core.manager.check_invariants()
    first.close()
    assert completed(llm, tokens).num_cached_tokens == computed
    check_clean(llm)


def test_books_balance_after_every_step_of_a_long_mixed_run() -> None:
    """Case 18: corruption crept in over thousands of requests, and nothing looked for it.

    https://github.com/huggingface/text-generation-inference/issues/2871
    """
    model, generator = zoo.build("llama"), random.Random(18)
    llm = LLM(model, block_size=BS, num_blocks=24, max_num_batched_tokens=16, max_num_seqs=6)
    heads = [prompt(length, seed=length) for length in (3, 4, 8, 13)]
    streams: list[Any] = []
    for _ in range(120):
        action = generator.random()
        if action < 0.4 and len(streams) < 5:
            tokens = [*generator.choice(heads), *prompt(generator.randint(1, 9), seed=generator.randint(0, 5))]
            params = SamplingParams(temperature=0.8, max_tokens=generator.randint(1, 20), n=generator.randint(1, 3))
            streams.append(llm.stream(tokens, params))
            next(streams[-1])
        elif action < 0.55 and streams:
            streams.pop(generator.randrange(len(streams))).close()
        elif streams and next(streams[at := generator.randrange(len(streams))], None) is None:
            streams.pop(at)
        llm.core.manager.check_invariants()
    for stream in streams:
        stream.close()
    stats = llm.stats()
    assert stats["evicted_blocks"] > 0 and stats["hit_tokens"] > 0 and stats["cow_copies"] > 0
    check_clean(llm)


def _freed_while_in_use(manager: KVCacheManager, table: Any) -> None:
    manager._pool.decref([table.blocks[0]])


def _held_twice(manager: KVCacheManager, table: Any) -> None:
    manager._pool.incref([table.blocks[0]])


def _in_two_places(manager: KVCacheManager, table: Any) -> None:
    table.blocks[1] = table.blocks[0]


def _leaked(manager: KVCacheManager, table: Any) -> None:
    manager._pool.allocate(1)


@pytest.mark.parametrize("corrupt", [_freed_while_in_use, _held_twice, _in_two_places, _leaked])
def test_the_check_finds_what_went_wrong(corrupt: Callable[[KVCacheManager, Any], None]) -> None:
    """Case 18: free + tree + owned == total, references are those of tables, and no block is in two places.

    https://github.com/huggingface/text-generation-inference/issues/2871
    """
    manager, tokens = KVCacheManager(17, BS), prompt(10)
    table = manager.new_table()
    manager.append(table, len(tokens))
    manager.commit((), tokens, table)
    manager.check_invariants()
    corrupt(manager, table)
    with pytest.raises(InternalError):
        manager.check_invariants()
