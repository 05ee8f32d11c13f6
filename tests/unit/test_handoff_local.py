"""What must be served by one engine, told by the body."""

from typing import Any

import pytest

from gateway.handoff.bodies import why_local
from scorer.types import PdReason

FINE: dict[str, dict[str, Any]] = {
    "chat": {"messages": []},
    "completions": {"prompt": "x"},
    "messages": {"messages": [], "max_tokens": 5},
    "responses": {"input": "x"},
    "generate": {"token_ids": [1], "sampling_params": {}},
}
KINDS = sorted(FINE)


def why(kind: str, n_prompts: int = 1, **fields: Any) -> PdReason | None:
    if kind == "generate" and "sampling_params" not in fields:
        top = {name: fields.pop(name) for name in ("stream", "stream_options") if name in fields}
        fields = {"sampling_params": fields, **top}
    return why_local(kind, {**FINE[kind], **fields}, n_prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_requests_may_go_remote(kind: str) -> None:
    assert why(kind) is None
    assert why(kind, stream=True) is None
    assert why(kind, n=1, temperature=0, logprobs=2) is None


def test_what_has_no_prefill_leg() -> None:
    assert why_local(None, {}, 1) is PdReason.NOT_GENERATION
    assert why_local("embeddings", {}, 1) is PdReason.NOT_GENERATION


@pytest.mark.parametrize("kind", ["chat", "completions", "generate"])
def test_p10_several_samples_stay_with_one_engine(kind: str) -> None:
    """P10: one set of transfer params comes back for n sequences."""
    assert why(kind, n=3) is PdReason.N_SEQUENCES
    assert why(kind, best_of=2) is PdReason.BEST_OF
    assert why(kind, best_of=1) is None
    assert why(kind, n=0) is PdReason.WOULD_BE_REJECTED


def test_several_prompts_and_beams() -> None:
    assert why("completions", n_prompts=2) is PdReason.SEVERAL_PROMPTS
    assert why("chat", use_beam_search=True) is PdReason.BEAM_SEARCH
    assert why("completions", prompt_embeds="AAAA") is PdReason.NOT_READABLE


@pytest.mark.parametrize("value", [0, 1, -1])
@pytest.mark.parametrize("kind", ["chat", "completions", "generate"])
def test_p15_prompt_logprobs_and_echo_need_the_whole_prompt(kind: str, value: int) -> None:
    """P15: the decode engine has no logits of a prompt that it did not compute."""
    assert why(kind, prompt_logprobs=value) is PdReason.PROMPT_LOGPROBS
    if kind != "generate":
        assert why(kind, echo=True) is PdReason.ECHO
        assert why(kind, echo=False) is None


def test_responses_that_live_in_one_engine() -> None:
    assert why("responses", previous_response_id="resp_1") is PdReason.STORED_RESPONSE
    assert why("responses", background=True) is PdReason.STORED_RESPONSE
    assert why("responses", store=True, background=False) is None
    assert why("responses", tools=[{"type": "function", "name": "f"}]) is None
    assert why("responses", tools=[{"type": "code_interpreter"}]) is PdReason.N_SEQUENCES


def test_a_cut_that_depends_on_the_limit_would_differ_between_the_legs() -> None:
    assert why("responses", truncation="auto") is PdReason.NOT_READABLE
    assert why("responses", truncation=None) is PdReason.NOT_READABLE
    assert why("responses", truncation="auto", max_output_tokens=9) is None
    assert why("responses", truncation="disabled") is None
    assert why("chat", truncate_prompt_tokens=-1) is PdReason.NOT_READABLE
    assert why("chat", truncate_prompt_tokens=-1, max_tokens=9) is None
    assert why("chat", truncate_prompt_tokens=100) is None


@pytest.mark.parametrize("value", [0, -1, "x", "5", 1.5, 5.0, True, [], {}])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("chat", "max_tokens"),
        ("chat", "max_completion_tokens"),
        ("completions", "max_tokens"),
        ("messages", "max_tokens"),
        ("responses", "max_output_tokens"),
        ("generate", "max_tokens"),
    ],
)
def test_limits_that_an_engine_refuses_cost_no_prefill(kind: str, field: str, value: object) -> None:
    assert why(kind, **{field: value}) is PdReason.WOULD_BE_REJECTED


def test_messages_need_a_limit() -> None:
    assert why("messages", max_tokens=None) is PdReason.WOULD_BE_REJECTED
    assert why_local("messages", {"messages": []}, 1) is PdReason.WOULD_BE_REJECTED
    assert why("chat", max_tokens=None) is None


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("chat", {"min_tokens": 6, "max_tokens": 5}),
        ("chat", {"min_tokens": 6, "max_tokens": 9, "max_completion_tokens": 5}),
        ("completions", {"min_tokens": 17}),
        ("completions", {"min_tokens": None}),
        ("chat", {"min_tokens": -1}),
        ("chat", {"min_tokens": "1"}),
        ("generate", {"min_tokens": 6, "max_tokens": 5}),
        ("chat", {"stream": "yes"}),
        ("messages", {"stream": 1}),
        ("chat", {"stream_options": {"include_usage": True}}),
        ("chat", {"stream": True, "stream_options": "x"}),
        ("chat", {"stream": True, "stream_options": {"include_usage": "maybe"}}),
        ("chat", {"return_token_ids": 3}),
        ("responses", {"store": "x"}),
        ("responses", {"enable_response_messages": None}),
        ("generate", {"sampling_params": None}),
        ("generate", {"sampling_params": [1]}),
    ],
)
def test_replaced_fields_that_an_engine_refuses(kind: str, fields: dict[str, Any]) -> None:
    assert why(kind, **fields) is PdReason.WOULD_BE_REJECTED


def test_replaced_fields_that_are_fine() -> None:
    assert why("chat", min_tokens=5, max_tokens=5) is None
    assert why("chat", min_tokens=500) is None
    assert why("completions", min_tokens=16) is None
    assert why("chat", stream=True, stream_options={"include_usage": True}) is None
    assert why("chat", stream_options={}) is None
    assert why("chat", stream=None, stream_options=None) is None
    assert why("messages", min_tokens="whatever", stream_options=3) is None  # Not fields of that API.


def test_a_limit_above_the_context() -> None:
    fields = {"messages": [], "max_tokens": 2049}
    assert why_local("chat", fields, 1, context_tokens=2048) is PdReason.WOULD_BE_REJECTED
    assert why_local("chat", fields, 1, context_tokens=2049) is None
    assert why_local("chat", fields, 1) is None
