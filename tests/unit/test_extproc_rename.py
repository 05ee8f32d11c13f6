"""A model's name in responses that come in pieces."""

import time

import pytest

from gateway.extproc.rename import Renamer


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        (
            b'{"id":"cmpl-123","model":"vllm-backend-01","choices":[]}',
            b'{"id":"cmpl-123","model":"gpt-4-proxy","choices":[]}',
        ),
        (b'data: {"model":"vllm-backend-01"}\n\n', b'data: {"model":"gpt-4-proxy"}\n\n'),
        (b'{"model": "vllm-backend-01"}', b'{"model": "gpt-4-proxy"}'),
        (b'{"response":{"model" :\n "vllm-backend-01"}}', b'{"response":{"model" :\n "gpt-4-proxy"}}'),
        (b'{"id":"cmpl-123","choices":[]}', b'{"id":"cmpl-123","choices":[]}'),
        (b"data: [DONE]", b"data: [DONE]"),
        (b'{"model":"vllm-backend-012"}', b'{"model":"vllm-backend-012"}'),
        (b'{"text":"\\"model\\":\\"vllm-backend-01\\""}', b'{"text":"\\"model\\":\\"vllm-backend-01\\""}'),
        (b'{"a\\"model":"vllm-backend-01"}', b'{"a\\"model":"vllm-backend-01"}'),
        (b'{"old_model":"vllm-backend-01"}', b'{"old_model":"vllm-backend-01"}'),
        (b'["model","vllm-backend-01"]', b'["model","vllm-backend-01"]'),
    ],
)
def test_only_the_value_of_the_key_model_is_renamed(text: bytes, renamed: bytes) -> None:
    assert Renamer("vllm-backend-01", "gpt-4-proxy").feed(text, True) == renamed
    for place in range(len(text)):
        renamer = Renamer("vllm-backend-01", "gpt-4-proxy")
        assert renamer.feed(text[:place], False) + renamer.feed(text[place:], True) == renamed


@pytest.mark.parametrize(
    ("chunk", "held"),
    [
        (b'data: {"n":1}\n\n', b""),
        (b'{"mod', b'"mod'),
        (b'{"model', b'"model'),
        (b'{"model"', b'"model"'),
        (b'{"model" : "ab', b'"model" : "ab'),
        (b'{"model":"abd', b""),
        (b'{"model":"abc', b'"model":"abc'),
        (b'{"model":"abc"', b""),
        (b'{"x":"', b'"'),
        (b'{"model"' + b" " * 9, b""),
    ],
)
def test_only_what_may_become_the_name_is_held_back(chunk: bytes, held: bytes) -> None:
    renamer = Renamer("abc", "x")
    out = renamer.feed(chunk, False)
    assert out == chunk.removesuffix(held).replace(b'"abc"', b'"x"')
    assert renamer.feed(b"", True) == held


def test_what_does_not_change_is_not_copied() -> None:
    chunk = b'data: {"n":1}\n\n'
    assert Renamer("abc", "x").feed(chunk, False) is chunk


def test_a_name_of_any_length_is_renamed() -> None:
    name = "m" * 5000
    renamer = Renamer(name, "x")
    text = b'{"model":"%s"}' % name.encode()
    assert b"".join(renamer.feed(text[i : i + 1], False) for i in range(len(text))) == b'{"model":"x"}'


def test_many_names_in_one_chunk_cost_one_pass() -> None:
    text = b'{"model":"served"},' * 200_000
    began_s = time.process_time()
    assert Renamer("served", "asked").feed(text, True) == text.replace(b"served", b"asked")
    assert time.process_time() - began_s < 3
