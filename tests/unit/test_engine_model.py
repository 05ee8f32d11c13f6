"""The engine model's behaviour, one vLLM rule a test."""

from collections.abc import Sequence

import pytest

from bench.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from bench.engine.model import Engine
from bench.engine.pool import BlockPool
from bench.engine.request import EngineConfig, Request, StepResult
from bench.engine.timing import Timing, preset

STEP = Timing(0.01, 0.0, 0.0, 0.0, 0.0)


def engine(
    num_gpu_blocks: int = 20,
    block_size: int = 4,
    max_model_len: int = 40,
    timing: Timing = STEP,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    **more: bool,
) -> Engine:
    return Engine(
        EngineConfig(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            timing=timing,
            **more,
        )
    )


def request(name: str, prompt: Sequence[int], max_tokens: int = 1, **more: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def drain(core: Engine) -> list[StepResult]:
    results = []
    while not core.idle():
        results.append(core.step(0.0))
        assert len(results) < 1000
    return results


def serve(core: Engine, one: Request) -> tuple[int, list[Event]]:
    """Serve one request alone: (cached tokens, events)."""
    core.add_request(one, 0.0)
    results = drain(core)
    return results[0].admitted[0].cached_tokens, [event for result in results for event in result.events]


def kinds(events: Sequence[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_full_hit_announces_nothing_and_recomputes_the_last_block() -> None:
    core = engine()
    _, events = serve(core, request("a", range(10)))
    assert kinds(events) == ["BlockStored"]
    cached, events = serve(core, request("b", range(10)))
    assert (cached, events) == (8, [])


def test_a_prompt_of_whole_blocks_hits_all_but_the_last_and_makes_a_second_copy() -> None:
    core = engine()
    serve(core, request("a", range(8)))
    cached, events = serve(core, request("b", range(8)))
    assert cached == 4
    assert kinds(events) == ["BlockStored"]
    assert sorted(count for _, count in core.resident()) == [1, 2]


def test_each_copy_is_removed_on_its_own() -> None:
    core = engine(num_gpu_blocks=11, max_model_len=40)
    serve(core, request("a", range(8)))
    serve(core, request("b", range(8)))
    _, events = serve(core, request("c", range(100, 139)))
    removed = [event.block_hashes[0] for event in events if isinstance(event, BlockRemoved)]
    assert len(removed) == 3
    assert len(set(removed)) == 2


def test_eviction_goes_tail_first_and_is_announced_ahead_of_what_needed_the_room() -> None:
    core = engine(num_gpu_blocks=11, max_model_len=40)
    _, stored = serve(core, request("a", range(38)))
    assert isinstance(stored[0], BlockStored)
    chain = stored[0].block_hashes
    _, events = serve(core, request("b", range(100, 112), max_tokens=1))
    # The partial tail block has no hash, so it is reused without losing anything.
    assert kinds(events) == ["BlockRemoved", "BlockRemoved", "BlockStored"]
    assert [event.block_hashes for event in events[:2] if isinstance(event, BlockRemoved)] == [[chain[8]], [chain[7]]]


def test_blocks_filled_by_decode_are_announced_with_generated_ids_and_partial_ones_never() -> None:
    core = engine()
    core.add_request(request("a", range(6), max_tokens=8), 0.0)
    results = drain(core)
    generated = [token.token_id for result in results for token in result.tokens]
    stored = [event for result in results for event in result.events if isinstance(event, BlockStored)]
    # 6 + 8 tokens; the last one is never computed, so 13 tokens make 3 full blocks.
    assert [len(event.block_hashes) for event in stored] == [1, 1, 1]
    assert stored[1].token_ids == [4, 5, *generated[:2]]
    assert stored[1].parent_block_hash == stored[0].block_hashes[0]
    assert stored[2].token_ids == generated[2:6]


def test_a_reset_is_announced_only_with_the_next_step() -> None:
    core = engine()
    serve(core, request("a", range(10)))
    assert core.reset_prefix_cache()
    assert core.next_wake_s(0.0) is None
    cached, events = serve(core, request("b", range(10)))
    assert cached == 0
    assert kinds(events) == ["AllBlocksCleared", "BlockStored"]


def test_a_reset_is_refused_while_a_block_is_in_use() -> None:
    core = engine()
    core.add_request(request("a", range(10), max_tokens=5), 0.0)
    core.step(0.0)
    assert not core.reset_prefix_cache()


def test_report_mode_full_announces_a_hit_again_from_block_0() -> None:
    core = engine()
    _, first = serve(core, request("a", range(10)))
    _, again = serve(core, request("b", range(14), report_full=True))
    assert isinstance(first[0], BlockStored)
    assert isinstance(again[0], BlockStored)
    assert isinstance(again[1], BlockStored)
    assert again[0].block_hashes == first[0].block_hashes
    assert again[0].parent_block_hash is None
    assert again[1].parent_block_hash == first[0].block_hashes[-1]


def test_namespaces_do_not_share_blocks() -> None:
    core = engine(num_gpu_blocks=60)
    serve(core, request("a", range(10)))
    assert serve(core, request("b", range(10), lora_name="l1", lora_id=1))[0] == 0
    assert serve(core, request("c", range(10), cache_salt="s"))[0] == 0
    assert serve(core, request("d", range(10), lora_name="l1", cache_salt="s"))[0] == 0
    assert serve(core, request("e", range(10), lora_name="l1", lora_id=1))[0] == 8


def test_extra_keys_name_the_adapter_everywhere_and_the_salt_in_the_first_block() -> None:
    _, events = serve(engine(), request("a", range(10), lora_name="l1", lora_id=3, cache_salt="s"))
    (stored,) = events
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [["l1", "s"], ["l1"]]
    assert (stored.lora_id, stored.lora_name) == (3, "l1")


def test_a_sibling_in_the_same_step_already_hits() -> None:
    core = engine()
    core.add_request(request("a", range(10)), 0.0)
    core.add_request(request("b", range(10)), 0.0)
    assert [admitted.cached_tokens for admitted in core.step(0.0).admitted] == [0, 8]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    core = engine(max_num_batched_tokens=8)
    core.add_request(request("a", range(4), max_tokens=6), 0.0)
    core.step(0.0)
    core.add_request(request("b", range(50, 70)), 0.0)
    counts = []
    while not core.idle():
        result = core.step(0.0)
        counts.append((result.decode_seqs, result.prefill_tokens))
    assert counts[:3] == [(1, 7), (1, 7), (1, 6)]


def test_waiting_is_first_come_first_served_and_bounded_by_max_num_seqs() -> None:
    core = engine(max_num_seqs=1)
    for name in "abc":
        core.add_request(request(name, range(4), max_tokens=2), 0.0)
    ended = [token.request_id for result in drain(core) for token in result.tokens if token.finish_reason]
    assert ended == ["a", "b", "c"]


def test_a_dry_pool_preempts_the_last_admitted_and_recomputes_it() -> None:
    core = engine(num_gpu_blocks=11, max_model_len=40)
    core.add_request(request("a", range(16), max_tokens=20), 0.0)
    core.add_request(request("b", range(100, 116), max_tokens=20), 0.0)
    results = drain(core)
    assert [name for result in results for name in result.preempted] == ["b"]
    assert core.stats().preemptions == 1
    tokens = [token for result in results for token in result.tokens if token.request_id == "b"]
    assert [token.position for token in tokens] == list(range(20))
    # A resumed request is counted once.
    assert core.stats().prefix_queries == 32


def test_abort_frees_everything_wherever_the_request_is() -> None:
    core = engine(max_num_seqs=1, timing=Timing(0.01, 0, 0, 0, 0, front_base_s=1.0))
    for name in "abc":
        core.add_request(request(name, range(10), max_tokens=5), 0.0)
    core.step(1.0)  # a runs, b waits
    core.add_request(request("d", range(10), max_tokens=5), 1.0)  # not visible to the scheduler yet
    assert core.stats().running == 1
    for name in "dba":
        assert core.abort(name)
        assert not core.abort(name)
    assert core.pool.num_used == 0
    assert not core.idle()
    assert core.step(1.0).admitted[0].request_id == "c"


def test_front_end_time_delays_admission() -> None:
    core = engine(timing=Timing(0.01, 0, 0, 0, 0, front_base_s=0.5, front_per_token_s=0.1))
    core.add_request(request("a", range(10)), 2.0)
    assert core.next_wake_s(2.0) == pytest.approx(3.5)
    assert core.step(3.0).scheduled_tokens == 0
    (admitted,) = core.step(3.5).admitted
    assert admitted.queued_s == pytest.approx(1.5)


def test_remote_prefill_pins_on_one_side_and_pulls_on_the_other() -> None:
    prefill, decode = engine(), engine()
    prefill.add_request(request("p", range(10), hold_blocks=True), 0.0)
    drain(prefill)
    assert (prefill.stats().held, prefill.stats().held_blocks) == (1, 3)
    assert len(prefill.held_blocks("p")) == 3
    decode.add_request(request("d", range(10), max_tokens=3, remote_tokens=10), 0.0)
    result = decode.step(0.0)
    assert [(pull.request_id, pull.num_tokens, pull.num_blocks) for pull in result.pulls] == [("d", 10, 3)]
    assert decode.next_wake_s(0.0) is None
    decode.pull_done("d")
    assert prefill.release("p")
    assert prefill.pool.num_used == 0
    results = drain(decode)
    assert results[0].scheduled_tokens == 1  # only the last prompt token is computed again
    assert kinds(results[0].events) == ["BlockStored"]
    stats = decode.stats()
    assert (stats.external_hits, stats.pulled_tokens, stats.prompt_tokens) == (10, 10, 10)


def test_a_failed_pull_is_computed_here() -> None:
    core = engine()
    core.add_request(request("d", range(10), remote_tokens=10), 0.0)
    core.step(0.0)
    core.pull_done("d", ok=False)
    assert core.stats().prompt_tokens == 0  # not yet known where they come from
    assert drain(core)[0].prefill_tokens == 10
    stats = core.stats()
    assert (stats.external_hits, stats.pulled_tokens) == (10, 0)  # as in vLLM, a failed pull counts as a hit
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (10, 0)


def answers(core: Engine, *requests: Request) -> list[list[int]]:
    """The tokens of each request, run one after the other; pulls bring the KV of another prompt."""
    found = []
    for each in requests:
        core.add_request(each, 0.0)
        ids: list[int] = []
        while core.next_wake_s(0.0) is not None:
            result = core.step(0.0)
            ids += [token.token_id for token in result.tokens]
            for pull in result.pulls:
                core.pull_done(pull.request_id, garbage=7)
        found.append(ids)
    return found


def test_wrong_kv_spoils_every_answer_built_on_it() -> None:
    """Also the ones computed here on top of it, until the blocks are handed out again."""
    right, right_longer = answers(
        engine(), request("a", range(10), max_tokens=4), request("b", range(14), max_tokens=4)
    )
    core = engine()
    pulled, plain, longer = answers(
        core,
        request("p", range(10), max_tokens=4, remote_tokens=10),
        request("a", range(10), max_tokens=4),
        request("b", range(14), max_tokens=4),
    )
    assert right not in (pulled, plain)
    assert right_longer != longer
    assert pulled != plain  # its last block was computed anew, on wrong KV
    assert core.reset_prefix_cache()
    assert answers(core, request("c", range(10), max_tokens=4)) == [right]
    again = answers(engine(), request("p", range(10), max_tokens=4, remote_tokens=10))
    assert again == [pulled]  # as reproducible as everything else


def test_blocks_count_how_often_they_were_handed_out() -> None:
    pool = BlockPool(4)
    blocks, _ = pool.allocate(2)
    pool.spoil(blocks, 5)
    assert pool.garbage(blocks) != pool.garbage(blocks[:1]) != 0
    pool.free(blocks)
    assert pool.generation == [0, 1, 1, 0]
    everything, _ = pool.allocate(3)
    assert pool.generation == [0, 2, 2, 1]
    assert pool.garbage(everything) == 0


def test_step_time_adds_up() -> None:
    timing = Timing(0.1, 0.01, 0.001, 0.0001, 0.00001, prefill_floor_s=0.5)
    assert timing.step_s(2, 30, 0, 0.0) == pytest.approx(0.15)
    assert timing.step_s(2, 30, 10, 50.0) == pytest.approx(0.5)
    assert timing.step_s(2, 30, 10_000, 50.0) == pytest.approx(1.1505)
    assert timing.faster(2).step_s(2, 30, 0, 0.0) == pytest.approx(0.075)


def test_h200_preset_reproduces_its_measurements() -> None:
    """32 streams of 8k tokens decode in 14.1 ms; queued 8k prefills follow each other every 215 ms."""
    h200 = preset("h200-7b")
    assert h200.step_s(32, 32 * 8192, 0, 0.0) == pytest.approx(0.0141, rel=0.05)
    assert h200.step_s(0, 0, 8192, 0.5 * 8192**2) == pytest.approx(0.215, rel=0.05)
    with pytest.raises(ValueError, match="h200-7b"):
        preset("nope")


@pytest.mark.parametrize(
    "bad",
    [
        request("x", []),
        request("x", range(40)),
        request("x", range(4), max_tokens=0),
        request("x", range(4), remote_tokens=5),
    ],
)
def test_what_can_never_be_served_is_refused(bad: Request) -> None:
    core = engine()
    with pytest.raises(ValueError, match=r"token|prompt"):
        core.add_request(bad, 0.0)
    assert core.idle()


def test_config_refuses_a_context_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        EngineConfig(block_size=16, num_gpu_blocks=10, max_model_len=160)


def test_pool_without_caching_announces_nothing() -> None:
    core = engine(enable_prefix_caching=False)
    serve(core, request("a", range(10)))
    cached, events = serve(core, request("b", range(10)))
    assert (cached, events) == (0, [])
    assert not any(isinstance(event, AllBlocksCleared) for event in events)


def test_pool_never_hands_out_the_null_block() -> None:
    pool = BlockPool(4)
    blocks, _ = pool.allocate(3)
    assert blocks == [1, 2, 3]
    with pytest.raises(ValueError, match="0 free"):
        pool.allocate(1)


def test_evicting_one_of_three_copies_leaves_the_others_findable() -> None:
    pool = BlockPool(5)
    blocks, _ = pool.allocate(3)
    for block in blocks:
        pool.cache(block, 77)
    for block in (blocks[1], blocks[0], blocks[2]):  # eviction in that order, after the untouched fourth block
        pool.free([block])
    left = []
    for _ in range(4):
        _, evicted = pool.allocate(1)
        left.append((evicted, dict(pool.resident()), pool.lookup([77], 1)))
    assert left == [
        ([], {77: 3}, [blocks[0]]),
        ([77], {77: 2}, [blocks[0]]),
        ([77], {77: 1}, [blocks[2]]),
        ([77], {}, []),
    ]


def test_a_preempted_request_resumes_ahead_of_waiting_ones() -> None:
    core = engine(num_gpu_blocks=11, max_model_len=40, max_num_seqs=2)
    core.add_request(request("a", range(16), max_tokens=20), 0.0)
    core.add_request(request("b", range(100, 116), max_tokens=20), 0.0)
    core.add_request(request("c", range(200, 204), max_tokens=2), 0.0)
    order: list[str] = []
    preempted = 0
    while not core.idle():
        result = core.step(0.0)
        preempted += len(result.preempted)
        if preempted:
            order += [token.request_id for token in result.tokens]
    assert preempted == 1
    assert order.index("b") < order.index("c")
