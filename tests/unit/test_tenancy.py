"""Whose a request is, and its cache salt."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.bad_request import BadRequest
from gateway.config.schema import TenancyConfig
from gateway.errors import UserError
from gateway.proxy.errors import ApiError
from gateway.tenancy import NO_TENANCY, Tenancy, shown

SECRET = "s" * 32
DERIVE = Tenancy(TenancyConfig(header="x-tenant", salt="derive"), SECRET)
BODY = b'{ "model": "m",  "prompt": "hi", "temperature": 1.0, "n": 1e0 }'


def salt_of(tenancy: Tenancy, tenant: str | None, body: bytes = BODY) -> str:
    headers = CIMultiDict({} if tenant is None else {"X-Tenant": tenant})
    _, out = tenancy.take(headers, body, salted=True)
    salt = json.loads(out)["cache_salt"]
    assert isinstance(salt, str)
    return salt


def test_without_a_header_everybody_is_one_and_nothing_changes() -> None:
    headers = CIMultiDict({"x-tenant": "a"})
    assert NO_TENANCY.take(headers, BODY, salted=True) == (None, BODY)
    assert headers == {"x-tenant": "a"}


def test_the_identity_stays_here_unless_it_is_to_be_forwarded() -> None:
    for forward in (False, True):
        headers = CIMultiDict([("X-Tenant", " a "), ("x-tenant", "a"), ("accept", "b")])
        tenancy = Tenancy(TenancyConfig(header="x-tenant", forward_header=forward))
        assert tenancy.take(headers, BODY, salted=True) == ("a", BODY)
        assert ("x-tenant" in headers) is forward


def test_salts_differ_by_tenant_own_salt_and_secret_and_by_nothing_else() -> None:
    own = b'{"model":"m","cache_salt":"mine"}'
    salts = [
        salt_of(DERIVE, "a"),
        salt_of(DERIVE, "b"),
        salt_of(DERIVE, None),
        salt_of(DERIVE, "a", own),
        salt_of(DERIVE, "b", own),
        salt_of(DERIVE, "am", b'{"cache_salt":"ine"}'),
        salt_of(Tenancy(TenancyConfig(header="x-tenant", salt="derive"), SECRET + "t"), "a"),
    ]
    assert len(set(salts)) == len(salts)
    assert salt_of(DERIVE, "a", b'{"cache_salt":null}') == salts[0]
    assert all(len(salt) == 43 for salt in salts)


def test_a_tenant_cannot_use_the_salt_of_another() -> None:
    theirs = salt_of(DERIVE, "a")
    assert salt_of(DERIVE, "b", json.dumps({"cache_salt": theirs}).encode()) != theirs


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":"x","cache_salt":"y"}',
        b'{"cache_\\u0073alt":"x"}',
        b'{"messages":[{"cache_salt":"x"}],"cache_salt":"x","z":{"cache_salt":"x"}}',
        b'{"cache_salt":"x","note":"\\"cache_salt\\":\\"x\\""}',
        '\ufeff{"cache_salt":"x"}'.encode(),
        '{"cache_salt":"x"}'.encode("utf-16"),
        b'{"n":NaN,"cache_salt":"x"}',
        b"{}",
    ],
)
def test_the_last_word_is_ours_however_a_body_is_written(body: bytes) -> None:
    _, out = DERIVE.take(CIMultiDict({"x-tenant": "a"}), body, salted=True)
    decoded = json.loads(out)
    wanted = {"a": salt_of(DERIVE, "a", b'{"cache_salt":"x"}'), "y": salt_of(DERIVE, "a", b'{"cache_salt":"y"}')}
    assert decoded["cache_salt"] in (*wanted.values(), salt_of(DERIVE, "a"))
    before = json.loads(body)
    before.pop("cache_salt", None)
    decoded.pop("cache_salt")
    assert str(decoded) == str(before)


@pytest.mark.parametrize("salt", [b'""', b"1", b"[]", b'"\\ud800"x', b'"' + b"x" * 1025 + b'"'])
def test_what_no_engine_takes_for_a_salt_is_refused(salt: bytes) -> None:
    with pytest.raises(BadRequest):
        DERIVE.take(CIMultiDict({"x-tenant": "a"}), b'{"cache_salt":' + salt + b"}", salted=True)


@pytest.mark.parametrize("body", [b"--form\r\n", b"[1]", b"not json", b'{"a":1'])
def test_what_cannot_be_salted_is_not_served(body: bytes) -> None:
    with pytest.raises(BadRequest):
        DERIVE.take(CIMultiDict({"x-tenant": "a"}), body, salted=True)
    with pytest.raises(BadRequest):
        DERIVE.take(CIMultiDict({"x-tenant": "a", "content-encoding": "gzip"}), b"{}", salted=True)
    assert DERIVE.take(CIMultiDict({"x-tenant": "a"}), body, salted=False) == ("a", body)


def test_only_spaces_and_tabs_around_an_identity_are_none_of_it() -> None:
    """Other spaces are part of a name that somebody may have registered beside another's."""
    tenancy = Tenancy(TenancyConfig(header="x-tenant", salt="derive"), SECRET)

    def salt(tenant: str) -> bytes:
        return tenancy.take(CIMultiDict({"x-tenant": tenant}), b"{}", salted=True)[1]

    assert salt("t") == salt(" t\t")
    assert len({salt(f"t{space}") for space in ("", "\xa0", "\x85", "\u2028")}) == 4


def test_an_identity_is_one_and_can_be_demanded() -> None:
    with pytest.raises(BadRequest):
        DERIVE.take(CIMultiDict([("x-tenant", "a"), ("x-tenant", "b")]), BODY, salted=True)
    with pytest.raises(BadRequest):
        DERIVE.take(CIMultiDict({"x-tenant": "a" * 300}), BODY, salted=True)
    strict = Tenancy(TenancyConfig(header="x-tenant", required=True))
    with pytest.raises(ApiError) as refused:
        strict.take(CIMultiDict({"x-tenant": " "}), BODY, salted=True)
    assert (refused.value.status, refused.value.code) == (401, "no_identity")
    assert strict.take(CIMultiDict(), b"", salted=True, anonymous=True) == (None, b"")


def test_settings_that_could_not_isolate_stop_the_start() -> None:
    for settings, environment in (
        (TenancyConfig(salt="derive"), {"CACHE_SALT_SECRET": SECRET}),
        (TenancyConfig(salt="derive", header="x"), {}),
        (TenancyConfig(salt="derive", header="x"), {"CACHE_SALT_SECRET": "short"}),
        (TenancyConfig(required=True), {}),
    ):
        with pytest.raises(UserError):
            Tenancy.of(settings, environment)
    assert Tenancy.of(TenancyConfig(salt="derive", header="x"), {"CACHE_SALT_SECRET": SECRET}).by_tenant


def test_tenants_are_not_shown_by_name() -> None:
    assert shown("acme") == "accb46996fcf"  # printf acme | b2sum -l 48
    assert shown("") == "none"


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(['"cache_salt":"x"', "cache_salt"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["cache_salt", "a", "b"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "messages"]), _json, max_size=3),
    st.none() | st.text(min_size=1, max_size=5),
)
def test_any_body_gets_the_salt_and_loses_nothing(fields: dict[str, object], own: str | None) -> None:
    body = {**fields, **({} if own is None else {"cache_salt": own})}
    _, out = DERIVE.take(CIMultiDict({"x-tenant": "a"}), json.dumps(body).encode(), salted=True)
    decoded = json.loads(out)
    assert decoded.pop("cache_salt") == salt_of(DERIVE, "a", json.dumps({"cache_salt": own}).encode())
    assert decoded == fields


@pytest.mark.parametrize("codings", [("gzip",), ("GZIP",), ("identity", "gzip"), ("identity, br",)])
def test_what_is_compressed_anywhere_in_its_headers_is_not_salted(codings: tuple[str, ...]) -> None:
    headers = CIMultiDict([("x-tenant", "a"), *(("Content-Encoding", coding) for coding in codings)])
    with pytest.raises(BadRequest, match="compressed"):
        DERIVE.take(headers, b"{}", salted=True)


def test_identity_is_no_compression() -> None:
    headers = CIMultiDict([("x-tenant", "a"), ("Content-Encoding", "Identity"), ("Content-Encoding", "")])
    assert b"cache_salt" in DERIVE.take(headers, b"{}", salted=True)[1]
