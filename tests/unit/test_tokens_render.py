"""Chat templates: what vLLM made of the same bodies, and the rules one by one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.tokens.conversation import Conversation
from gateway.tokens.given import ChatPrompt, OpaquePrompt, prompts_of
from gateway.tokens.local import LocalTokenizer, load
from gateway.tokens.settings import TokenSettings
from gateway.tokens.template import ChatTemplate, _environment
from gateway.tokens.types import CannotTokenize, Reason
from tests.support.token_models import DATA, make_model

RECORDED = [json.loads(line) for line in (DATA / "vllm_0.32_chats.jsonl").read_text(encoding="utf-8").splitlines()]
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LocalTokenizer]:
    loaded: dict[str, LocalTokenizer] = {}

    def get(template: str) -> LocalTokenizer:
        if template not in loaded:
            folder = make_model(tmp_path_factory.mktemp(template), template)
            loaded[template] = load(str(folder), TokenSettings(trust_request_chat_template=True))
        return loaded[template]

    return get


def render(local: LocalTokenizer, body: dict[str, Any], kind: str = "chat") -> str:
    (prompt,) = prompts_of(kind, body)
    assert isinstance(prompt, ChatPrompt), prompt
    return local.text_of(prompt).text


@pytest.mark.parametrize("case", RECORDED, ids=lambda c: f"{c['template']}-{c['kind']}")
def test_renders_what_vllm_rendered(case: dict[str, Any], models: Callable[[str], LocalTokenizer]) -> None:
    before = copy.deepcopy(case["body"])
    (prompt,) = prompts_of(case["kind"], case["body"])
    if "refused" in case:
        if isinstance(prompt, ChatPrompt):
            with pytest.raises(CannotTokenize):
                models(case["template"]).text_of(prompt)
        else:
            assert isinstance(prompt, OpaquePrompt)
    else:
        assert isinstance(prompt, ChatPrompt)
        assert models(case["template"]).text_of(prompt).text == case["text"]
    assert case["body"] == before, "the request body is not ours to change"


def test_llama3_by_hand(models: Callable[[str], LocalTokenizer]) -> None:
    body = {"messages": [{"role": "system", "content": " Be brief. "}, USER]}
    assert render(models("llama3"), body) == (
        "<|bos|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_tool_arguments_are_printed_as_json_not_as_a_quoted_string(models: Callable[[str], LocalTokenizer]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich", "x": "<&\'>"}'}}
    body = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert '{"name": "f", "arguments": {"city": "Zürich", "x": "<&\'>"}}' in render(models("chatml"), body)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("The answer is ", "<|im_start|>assistant\nThe answer is "),
        ("The answer is", "<|im_start|>assistant\nThe answer is"),
    ],
)
def test_continue_final_message_stays_open(
    content: str, expected: str, models: Callable[[str], LocalTokenizer]
) -> None:
    body = {
        "messages": [USER, {"role": "assistant", "content": content}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert render(models("chatml"), body).endswith(expected)


def test_strict_alternation_is_refused_as_by_the_template(models: Callable[[str], LocalTokenizer]) -> None:
    with pytest.raises(CannotTokenize) as caught:
        render(models("mistral"), {"messages": [USER, USER]})
    assert caught.value.reason is Reason.TEMPLATE_REJECTED


def test_i9_structured_content_is_passed_through_structurally(models: Callable[[str], LocalTokenizer]) -> None:
    """I9 (ab#2002): a list of parts was JSON-encoded as text, which gave other tokens."""
    parts = [
        {"type": "text", "text": "look: "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    seen_parts = render(models("vision"), {"messages": [{"role": "user", "content": parts[:1]}]})
    seen_string = render(models("chatml"), {"messages": [{"role": "user", "content": [*parts[:1], *parts[:1]]}]})
    assert "<|im_start|>user\nlook: <|im_end|>" in seen_parts
    assert "<|im_start|>user\nlook: \nlook: <|im_end|>" in seen_string
    assert "type" not in seen_parts + seen_string


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "vision",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nbefore<|vision_start|><|image_pad|><|vision_end|>",
        ),
        ("chatml", "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n"),
    ],
)
def test_text_before_the_first_image_still_counts(
    template: str, expected: str, models: Callable[[str], LocalTokenizer]
) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    content = [{"type": "text", "text": "before"}, image, {"type": "text", "text": "after"}, image]
    body = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": content}]}
    (prompt,) = prompts_of("chat", body)
    assert isinstance(prompt, ChatPrompt)
    rendered = models(template).text_of(prompt)
    assert rendered.prefix_only
    # Models that walk over parts keep them in place; strings get the placeholders in front of the message's text.
    assert expected.startswith(rendered.text)
    assert rendered.text.endswith("before" if template == "vision" else "user\n")


def test_request_template_only_if_trusted(tmp_path: Path) -> None:
    body = {"messages": [USER], "chat_template": "{{ messages[0].content }}!"}
    folder = str(make_model(tmp_path, "chatml"))
    assert render(load(folder, TokenSettings(trust_request_chat_template=True)), body) == "hi!"
    with pytest.raises(CannotTokenize) as caught:
        render(load(folder, TokenSettings()), body)
    assert caught.value.reason is Reason.UNTRUSTED_TEMPLATE


def test_server_flags_are_followed(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ 'T' if tools else 'N' }}{{ flavour }}{{ messages[0].content }}")
    settings = TokenSettings(
        chat_template_path=str(own),
        default_chat_template_kwargs={"flavour": "plum"},
        exclude_tools_when_tool_choice_none=True,
    )
    local = load(str(make_model(tmp_path / "m", "chatml")), settings)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(local, {"messages": [USER], "tools": tools}) == "Tplumhi"
    assert render(local, {"messages": [USER], "tools": tools, "tool_choice": "none"}) == "Nplumhi"
    assert render(local, {"messages": [USER], "chat_template_kwargs": {"flavour": "fig"}}) == "Nfighi"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "tools"])
def test_request_kwargs_cannot_replace_what_the_engine_sets(name: str, models: Callable[[str], LocalTokenizer]) -> None:
    with pytest.raises(CannotTokenize):
        render(models("chatml"), {"messages": [USER], "chat_template_kwargs": {name: "x"}})


def test_named_templates(tmp_path: Path) -> None:
    make_model(
        tmp_path,
        None,
        chat_template=[
            {"name": "default", "template": "plain {{ messages[0].content }}"},
            {"name": "tool_use", "template": "tools {{ messages[0].content }}"},
        ],
    )
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor {{ messages[0].content }}"}))
    local = load(str(tmp_path), TokenSettings())
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(local, {"messages": [USER]}) == "processor hi"
    assert render(local, {"messages": [USER], "tools": tools}) == "tools hi"


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(CannotTokenize) as caught:
        render(load(str(make_model(tmp_path, None)), TokenSettings()), {"messages": [USER]})
    assert caught.value.reason is Reason.NO_TEMPLATE


def test_harmony_chats_are_not_rendered_from_the_template(tmp_path: Path) -> None:
    make_model(tmp_path, "chatml")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    with pytest.raises(CannotTokenize) as caught:
        render(load(str(tmp_path), TokenSettings()), {"messages": [USER]})
    assert caught.value.reason is Reason.HARMONY


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% set l = messages[1:] %}{% for m in l %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages | list %}{% for p in m.content | reverse %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% macro r(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ r(m.content) }}{% endfor %}", "openai"),
        ("{% macro r(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ r(c=m.content) }}{% endfor %}", "openai"),
        ("{% macro r(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ r(m.role) }}{% endfor %}", "string"),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
         "openai"),
        ("{% for a, b in messages %}{% for p in a.content %}{{ p }}{% endfor %}{% endfor %}", "string"),
        ("{% for t in tools %}{% for p in t.content %}{{ p }}{% endfor %}{% endfor %}", "string"),
    ],
)  # fmt: skip
def test_content_format_detection(source: str, expected: str) -> None:
    assert ChatTemplate(source).content_format == expected


def test_globals_of_transformers() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}"
        "{{ strftime_now('%Y') }}{% generation %}{% set x = 1 %}g{% endgeneration %}{{ x }}"
    )
    years = {str(datetime.now().year)}
    text = template.render([{"role": "é", "content": "<b>"}, USER])
    years.add(str(datetime.now().year))
    assert text in {f'{{\n "role": "é",\n "content": "<b>"\n}}{year}g' for year in years}


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"],
)
def test_a_failing_template_is_no_crash(source: str) -> None:
    with pytest.raises(CannotTokenize) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.reason in (Reason.TEMPLATE_REJECTED, Reason.TEMPLATE_FAILED)


def test_blocks_leave_no_whitespace_behind() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if m.content %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n."
    )
    assert template.render([USER, USER]) == "hi\nhi\n."


@pytest.mark.parametrize("member", ["role", "items", "get", "absent", "__class__", "pop", "content"])
@pytest.mark.parametrize("message", [{"role": "user"}, {"items": 1, "content": "{}"}, {}])
def test_members_are_looked_up_as_the_sandbox_does(member: str, message: dict[str, Any]) -> None:
    stock = ImmutableSandboxedEnvironment()

    def shown(env: ImmutableSandboxedEnvironment) -> str:
        template = env.from_string("{{ (m.%s) is defined }} {{ m.%s is callable }} {{ m.%s }}" % ((member,) * 3))
        try:
            return template.render(m=message)
        except SecurityError as exc:
            return str(exc)

    assert _hide_addresses(shown(_environment())) == _hide_addresses(shown(stock))


def _hide_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def test_messages_that_need_no_change_are_passed_as_they_are_and_others_are_not() -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [a is b for a, b in zip(Conversation("string").build(plain), plain, strict=True)] == [True, True]
    other = [{"content": "a", "role": "user"}, {"role": "system", "content": "x-anthropic-billing-header: 1\nb"}]
    assert list(map(list, Conversation("string").build(other))) == [["role", "content"]] * 2
    assert Conversation("string").build(other)[1]["content"] == "b"
    assert Conversation("openai").build(plain)[0]["content"] == [{"type": "text", "text": "a"}]


def test_kwargs_cannot_shadow_globals(models: Callable[[str], LocalTokenizer]) -> None:
    body = {"messages": [USER, USER], "chat_template_kwargs": {"raise_exception": "x", "namespace": "y"}}
    template = ChatTemplate("{% set ns = namespace(n=1) %}{{ ns.n }}{{ named }}")
    assert template.render([USER], variables={"namespace": "y", "named": 2}) == "12"
    with pytest.raises(CannotTokenize) as caught:
        render(models("mistral"), body)
    assert caught.value.reason is Reason.TEMPLATE_REJECTED


def test_unknown_fields_of_parts_reach_the_template() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}, "detail_level": 3}
    built = Conversation("openai").build(
        [{"role": "user", "content": [part, {"type": "text", "text": "t", "mark": 1}]}]
    )
    assert built[0]["content"] == [{"type": "image", "detail_level": 3}, {"type": "text", "text": "t", "mark": 1}]
