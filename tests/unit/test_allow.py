"""Which prefill targets a hint may name."""

import pytest

from gateway.sidecar.allow import AllowList, parse_entry
from gateway.sidecar.endpoint import endpoint_of, parse_endpoint


def allows(entries: list[str], target: str) -> bool:
    return AllowList(entries).allows(parse_endpoint(target))


@pytest.mark.parametrize(
    ("entry", "target", "expected"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000", True),
        ("10.0.0.1:8000", "10.0.0.1:22", False),
        ("10.0.0.1:8000", "10.0.0.2:8000", False),
        ("10.0.0.1:*", "10.0.0.1:22", True),
        ("10.0.0.0/8:8000", "10.9.9.9:8000", True),
        ("10.0.0.0/8:8000", "10.9.9.9:8001", False),
        ("10.0.0.7/8:*", "10.9.9.9:1", True),
        ("10.0.0.0/8:*", "11.0.0.1:1", False),
        ("0.0.0.0/0:8000", "[::1]:8000", False),
        ("prefill-0.ns.svc:8000", "Prefill-0.NS.svc.:8000", True),
        ("Prefill-0.ns.svc.:8000", "prefill-0.ns.svc:8000", True),
        ("prefill-0:8000", "prefill-0.ns.svc:8000", False),
        ("[::1]:8000", "[0:0:0:0:0:0:0:1]:8000", True),
        ("[FD00::A]:*", "[fd00::a]:1", True),
        ("[fd00::/8]:8000", "[fd12::1]:8000", True),
        ("fd00::/8:8000", "[fd12::1]:8000", True),
        ("[fd00::/8]:*", "[fe80::1]:8000", False),
        ("10.0.0.1:8000", "[::ffff:10.0.0.1]:8000", True),
        ("[::ffff:10.0.0.1]:8000", "10.0.0.1:8000", True),
        ("10.0.0.0/8:*", "[::ffff:10.0.0.1]:8000", True),
        ("localhost:8000", "127.0.0.1:8000", False),
        ("127.0.0.1:8000", "localhost:8000", False),
        ("*", "anything.example:1", True),
        ("*", "[::1]:65535", True),
    ],
)
def test_what_an_entry_covers(entry: str, target: str, expected: bool) -> None:
    assert allows([entry], target) is expected


def test_o5_another_port_of_an_allowed_address_is_denied() -> None:
    """O5: llm-d's allow-list held addresses only, so every port of a prefill pod could be reached."""
    assert not allows([], "10.0.0.1:8000")
    assert not allows(["10.0.0.1:8000"], "10.0.0.1:22")


def test_llm_d_d5_52_allow_list() -> None:
    entries = ["10.244.1.100:*", "valid-pod:*", "valid-pod.ns.svc.cluster.local:*"]
    assert [
        allows(entries, target)
        for target in ("10.244.1.100:8001", "valid-pod:9999", "malicious.example.com:8080", "10.0.0.1:8000")
    ] == [True, True, False, False]


@pytest.mark.parametrize(
    "entry",
    ["", "host", "host:", "host:0", "host:65536", "host:http", ":8000", "::1:8000", "[::1]", "fd00::/8",
     "10.0.0.0/33:*", "http://host:8000", "user@host:8000", "ho st:1", "127.1:80",
     "*:8000", "[host]:1", "[fe80::1%eth0]:1", "h/x:1"],
)  # fmt: skip
def test_an_entry_that_cannot_be_read_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="cannot be read") as caught:
        parse_entry(entry)
    assert repr(entry) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["h", "h:", ":1", "h:0", "h:65536", "h:-1", "h:+1", "h: 1", "h:\uff11", "http://h:1", "h:1/x", "u@h:1", "h:1:2",
     "::1:8000", "[::1]", "[::1]8000", "[h]:1", "h%41:1", "h\n:1", "127.1:1", "0x7f.1:1", "2130706433:1", "h..x:1",
     "-h:1", "é:1", "[fe80::1%1]:1", "x" * 254 + ":1"],
)  # fmt: skip
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Pod-1.NS.:80", "pod-1.ns:80"), ("[0:0::1]:8000", "[::1]:8000"), ("[::ffff:1.2.3.4]:1", "1.2.3.4:1"),
     ("a_b:1", "a_b:1")],
)  # fmt: skip
def test_one_spelling(text: str, shown: str) -> None:
    assert str(parse_endpoint(text)) == shown
    assert parse_endpoint(shown) == parse_endpoint(text)


@pytest.mark.parametrize(
    ("url", "expected"),
    [("http://A:1/base", "a:1"), ("https://[::1]", "[::1]:443"), ("http://1.2.3.4", "1.2.3.4:80"),
     ("http://a b:1", None)],
)  # fmt: skip
def test_where_a_url_leads(url: str, expected: str | None) -> None:
    assert endpoint_of(url) == (None if expected is None else parse_endpoint(expected))
