"""Cases 8, 9, 10, 14: reuse at one token, eviction of cold leaves only, batches padded in different ways.

Case 8: transformers 5.24 BlockLedger.evict_cached_blocks; case 9: https://github.com/vllm-project/vllm/issues/53749 ;
case 10: https://github.com/huggingface/transformers/issues/30670 , /issues/34232 ; case 14:
https://github.com/vllm-project/vllm/issues/52897 , https://github.com/GeeeekExplorer/nano-vllm/issues/20
"""

from __future__ import annotations

import pytest
import torch

import hf_paged
from tests import zoo
from tests.regressions.helpers import decoder_of_an_encoder_decoder, ids, left_padded, paged, registered, stock

pytestmark = pytest.mark.versions

REUSING = [n for n in zoo.ALL if n not in zoo.RECURRENT and n not in zoo.ENCODER_DECODER]


def _hits(model: object) -> int:
    return hf_paged.cache_stats(model).hit_tokens


@pytest.mark.parametrize("name", REUSING)
def test_a_second_call_computes_only_what_is_new(name: str) -> None:
    model = zoo.build(name)
    first = ids(1, 19)
    with registered():
        answer = paged(model, first)
        turn = torch.cat([answer, ids(1, 5, seed=9)], dim=1)
        assert torch.equal(paged(model, turn), stock(model, turn))
        # everything but the last generated token, which was never run, and the new question
        assert _hits(model) == answer.shape[1] - 1


@pytest.mark.parametrize("name", zoo.RECURRENT)
def test_recurrent_models_do_not_reuse_and_stay_right(name: str) -> None:
    model, prompt = zoo.build(name), ids(1, 19)
    with registered():
        for _ in range(2):
            assert torch.equal(paged(model, prompt), stock(model, prompt))
        assert _hits(model) == 0


@pytest.mark.parametrize("shared", [1, 3, 4, 5, 15, 16, 17])
def test_reuse_is_token_granular(shared: int) -> None:
    model, head = zoo.build("llama"), ids(1, shared, seed=3)
    one = torch.cat([head, torch.full((1, 6), 5)], dim=1)
    two = torch.cat([head, torch.full((1, 6), 7)], dim=1)
    with registered():
        paged(model, one)
        assert torch.equal(paged(model, two), stock(model, two))
        assert _hits(model) == shared


@pytest.mark.parametrize("width", [4, 8, 16])
def test_a_fully_cached_prompt_of_whole_blocks_still_runs_one_token(width: int) -> None:
    model, prompt = zoo.build("llama"), ids(1, width)
    want = stock(model, prompt, output_logits=True, return_dict_in_generate=True)
    with registered():
        paged(model, prompt)
        again = paged(model, prompt, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(again.sequences, want.sequences)
        torch.testing.assert_close(again.logits, want.logits, rtol=1e-4, atol=1e-4)
        assert _hits(model) == width - 1
        del again


def test_differently_padded_batches_share_prefixes_and_equal_each_row_alone() -> None:
    model = zoo.build("llama")
    short, long = ids(1, 6, seed=1), ids(1, 17, seed=2)
    alone = [stock(model, row)[0, row.shape[1] :] for row in (short, long)]
    with registered():
        for filler in (0, 3, 11):
            width = 17 + filler
            tokens, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
            for row, prompt in enumerate((short, long)):
                tokens[row, width - prompt.shape[1] :], mask[row, width - prompt.shape[1] :] = prompt, 1
            out = paged(model, tokens, attention_mask=mask)
            for row in range(2):
                assert torch.equal(out[row, width:], alone[row])
        assert _hits(model) > 0


def test_a_batch_reuses_as_far_as_its_shortest_match() -> None:
    model = zoo.build("llama")
    seen, fresh = ids(1, 15, seed=1), ids(1, 6, seed=2)
    batch = {
        "input_ids": torch.cat([seen, torch.cat([torch.zeros(1, 9, dtype=torch.long), fresh], dim=1)]),
        "attention_mask": torch.cat([torch.ones(1, 15, dtype=torch.long), (torch.arange(15) >= 9).long()[None]]),
    }
    with registered():
        paged(model, seen)
        assert torch.equal(paged(model, **batch, cache_config={"engine": False}), stock(model, **batch))
        assert _hits(model) == 9  # the padding of the unknown row costs nothing
        assert torch.equal(paged(model, **batch), stock(model, **batch))
        assert _hits(model) == 9 + 14 + 5  # rows of the engine are on their own


def test_only_cold_leaves_are_evicted() -> None:
    model, hot = zoo.build("llama"), ids(1, 32, seed=1)
    with registered(memory=None, num_blocks=24):
        paged(model, hot, max_new_tokens=2)
        for i in range(6):  # each brings 5 blocks of its own; the pool holds three of them beside the hot prompt
            paged(model, torch.cat([hot, ids(1, 12, seed=10 + i)], dim=1), max_new_tokens=2)
        stats = hf_paged.cache_stats(model)
        assert stats.evicted_blocks > 0
        before = stats.hit_tokens
        paged(model, torch.cat([hot, ids(1, 3, seed=99)], dim=1), max_new_tokens=2)
        assert _hits(model) - before == 32


def test_prefix_caching_off_neither_stores_nor_finds() -> None:
    model, prompt = zoo.build("llama"), ids(1, 12)
    with registered():
        paged(model, prompt, cache_config={"prefix_caching": False})
        paged(model, prompt)
        paged(model, prompt, cache_config={"prefix_caching": False})
        stats = hf_paged.cache_stats(model)
        assert stats.hit_tokens == 0 and stats.cached_blocks > 0


def test_clear_returns_the_memory() -> None:
    model, prompt = zoo.build("llama"), ids(1, 12)
    with registered():
        paged(model, prompt)
        assert hf_paged.cache_stats(model).cached_blocks > 0
        hf_paged.clear(model)
        stats = hf_paged.cache_stats(model)
        assert stats.cached_blocks == stats.reserved_bytes == 0
        assert torch.equal(paged(model, prompt), stock(model, prompt))
        assert _hits(model) == 0


def test_custom_positions_and_embeddings_are_not_taken_for_the_prompt() -> None:
    model, prompt = zoo.build("llama"), ids(1, 12)
    shifted = {"position_ids": torch.arange(5, 17)[None]}
    embeds = {"inputs_embeds": torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))}
    with registered():
        paged(model, prompt)
        assert torch.equal(paged(model, prompt, **shifted), stock(model, prompt, **shifted))
        assert torch.equal(paged(model, **embeds), stock(model, **embeds))
        assert torch.equal(paged(model, prompt, **embeds), stock(model, prompt, **embeds))
        assert _hits(model) == 0


def test_multi_turn_from_a_returned_cache() -> None:
    model, prompt = zoo.build("llama"), left_padded([9, 13])
    with registered():
        first = paged(model, **prompt, return_dict_in_generate=True)
        turn = torch.cat([first.sequences, ids(2, 4, seed=5)], dim=1)
        mask = torch.cat([prompt["attention_mask"], torch.ones(2, turn.shape[1] - 13, dtype=torch.long)], dim=1)
        got = stock(model, turn, attention_mask=mask, past_key_values=first.past_key_values)
        assert torch.equal(got, stock(model, turn, attention_mask=mask))
        del first, got


def test_a_copied_cache_answers_many_questions_from_one_prompt() -> None:
    import copy

    model, prompt = zoo.build("llama"), ids(1, 18)
    cache = hf_paged.PagedCache(model.config, cache_config={"block_size": 4, "memory": "8MiB"})
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    held = cache.num_blocks
    for seed in range(3):
        question = torch.cat([prompt, ids(1, 4, seed=seed)], dim=1)
        twin = copy.deepcopy(cache)
        assert twin.num_blocks == held
        assert torch.equal(stock(model, question, past_key_values=twin), stock(model, question))
    assert cache.num_blocks == held and cache.get_seq_length() == 18
    manager = cache.state.shared.manager
    del twin
    manager.check_invariants()
    cache.free()
    assert manager.stats().owned_blocks == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("way", ["prompt_lookup", "draft"])
def test_assisted_decoding_reuses_and_leaves_prefixes(name: str, way: str) -> None:
    model = zoo.build(name)
    options = {"prompt_lookup_num_tokens": 3} if way == "prompt_lookup" else {"assistant_model": zoo.fresh(name, 1)}
    first = ids(1, 9).repeat(1, 3)[:, :23]  # repeats itself, so that looking up finds something
    with registered():
        answer = paged(model, first, **options)
        assert torch.equal(answer, stock(model, first, **options))
        turn = torch.cat([answer, ids(1, 5, seed=9)], dim=1)
        options["attention_mask"] = torch.ones_like(turn)  # else a generated padding token is taken for padding
        before = _hits(model)
        assert torch.equal(paged(model, turn, **options), stock(model, turn, **options))
        assert _hits(model) - before == answer.shape[1] - 1
        mask = {"attention_mask": options["attention_mask"]}
        assert torch.equal(paged(model, turn, **mask), stock(model, turn, **mask))  # nor did rejected candidates stay
        stats = hf_paged.cache_stats(model)
        assert stats.prompt_tokens == 23 + 2 * turn.shape[1]


def test_assisted_decoding_checks_its_ids() -> None:
    model, prompt = zoo.build("llama"), ids(1, 9)
    bad = prompt.clone()
    bad[0, 4] = zoo.VOCAB
    with registered():
        with pytest.raises(hf_paged.InvalidRequestError, match=str(zoo.VOCAB)):
            paged(model, bad, prompt_lookup_num_tokens=3)
        assert torch.equal(paged(model, prompt, prompt_lookup_num_tokens=3), stock(model, prompt))


def test_a_cache_of_ones_own_checks_ids_too() -> None:
    model, bad = zoo.build("llama"), torch.full((1, 9), zoo.VOCAB + 5)
    with registered(), pytest.raises(hf_paged.InvalidRequestError, match=str(zoo.VOCAB + 5)):
        stock(model, bad, past_key_values=hf_paged.PagedCache(model.config, cache_config={"memory": "8MiB"}))


@pytest.mark.parametrize("name", ["Bart", "Pegasus"])
def test_models_that_count_columns_share_prefixes_behind_the_same_padding(name: str) -> None:
    """They take no position_ids: a padded row's tokens are at other positions than the same tokens alone."""
    model = decoder_of_an_encoder_decoder(name, encoder_layers=2)
    padded = left_padded([12, 20, 12], seed=1)
    alone = padded["input_ids"][:1, 8:]
    with registered(block_size=4):
        for _ in range(2):
            assert torch.equal(paged(model, **padded), stock(model, **padded))
            assert torch.equal(paged(model, alone), stock(model, alone))
        # all columns but the last of the batch, and of the prompt alone
        assert _hits(model) == 11 + 19 + 11 + 11
        assert torch.equal(paged(model, padded["input_ids"][1:2]), stock(model, padded["input_ids"][1:2]))
        assert _hits(model) == 11 + 19 + 11 + 11 + 19


def test_positions_that_a_model_ignores_are_not_those_of_its_keys() -> None:
    model, padded = decoder_of_an_encoder_decoder("Bart", encoder_layers=2), left_padded([12, 20, 12], seed=1)
    alone = padded["input_ids"][:1, 8:]
    positions = (padded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    want = stock(model, **padded, position_ids=positions)
    with registered(block_size=4):
        for _ in range(2):
            assert torch.equal(paged(model, **padded, position_ids=positions), want)
            assert torch.equal(paged(model, alone), stock(model, alone))
