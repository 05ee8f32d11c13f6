"""The rules by which prompts are computed by prefill workers: llm-d's, Dynamo's, and the plain ones."""

import pytest

from scorer.disaggregation import FORMS, parse_policy
from scorer.types import PdReason


@pytest.mark.parametrize(
    ("threshold", "prompt", "cached", "remote"),
    [
        (0, 10, 5, False),
        (5, 10, 5, True),  # equal
        (5, 10, 8, False),
        (3, 10, 2, True),
        (1, 10, 10, False),
        (5, 10, 0, True),
        (20, 10, 0, False),
        (5, 20, 15, True),
        (5, 20, 16, False),
    ],
)
def test_threshold_is_llm_ds_decider(threshold: int, prompt: int, cached: int, remote: bool) -> None:
    """llm-d's table of its prefix-based decider (case 71): tokens that are not cached, and 0 turns it off."""
    policy = parse_policy(f"threshold:{threshold}")
    assert policy.rule(prompt, cached) is remote
    assert policy.reason is PdReason.THRESHOLD


@pytest.mark.parametrize(
    ("prompt", "cached", "isl", "isl_ratio"),
    [
        (8192, 0, True, True),  # long and cold
        (8192, 6144, True, False),  # 2048 left: not fewer, but only a quarter of the prompt
        (8192, 6145, False, False),  # 2047 left, and a quarter
        (2000, 0, True, False),  # short, all of it cold
        (2000, 800, False, False),  # short, six tenths cold
        (2000, 600, True, False),  # short, exactly seven tenths cold
        (10_000, 4000, True, True),  # 6000 left, exactly six tenths
        (10_000, 4001, True, False),  # 5999 left, less than six tenths
        (4096, 0, True, True),  # 4096 left, not fewer
        (4095, 0, True, False),
        (100, 100, False, False),
    ],
)
def test_dynamos_rules(prompt: int, cached: int, isl: bool, isl_ratio: bool) -> None:
    """isl: local when few tokens *and* a small share of them are cold; isl-ratio: when either is so."""
    assert parse_policy("isl:2048,0.7").rule(prompt, cached) is isl
    assert parse_policy("isl-ratio:4096,0.6").rule(prompt, cached) is isl_ratio


@pytest.mark.parametrize(
    ("text", "remote", "reason"),
    [
        ("header", False, PdReason.NO_HINT),
        ("local", False, PdReason.POLICY),
        ("always-remote", True, PdReason.POLICY),
        ("threshold: 7 ", True, PdReason.THRESHOLD),
        ("isl:0,0", True, PdReason.THRESHOLD),
        ("isl:1000, 1", False, PdReason.THRESHOLD),
        ("isl-ratio:0,0", True, PdReason.THRESHOLD),
        ("isl-ratio:0,1.0", False, PdReason.THRESHOLD),
        ("isl-ratio:1000 , .5", False, PdReason.THRESHOLD),
    ],
)
def test_forms(text: str, remote: bool, reason: PdReason) -> None:
    policy = parse_policy(text)
    assert (policy.text, policy.rule(100, 20), policy.reason) == (text, remote, reason)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "remote",
        "Local",
        "local:",
        "local:1",
        "header:",
        "always-remote:5",
        "threshold",
        "threshold:",
        "threshold:-1",
        "threshold:1.5",
        "threshold:1e3",
        "threshold:٣",
        "threshold:+5",
        "threshold:5,0.5",
        "isl",
        "isl:2048",
        "isl:2048,",
        "isl:,0.5",
        "isl:2048,1.01",
        "isl:2048,-0.1",
        "isl:2048,nan",
        "isl:2048,inf",
        "isl:2048,0.5,0.6",
        "isl:-2048,0.5",
        "isl-ratio:x,0.5",
        "isl_ratio:4096,0.6",
    ],
)
def test_what_is_no_policy_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="there are") as refused:
        parse_policy(text)
    assert repr(text) in str(refused.value)
    assert FORMS in str(refused.value)
