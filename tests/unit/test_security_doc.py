"""docs/keys.md and docs/security.md name what there is."""

import re
from pathlib import Path

import msgspec
import pytest

from gateway.auth.door import MOST_TENANTS, OUTCOMES
from gateway.auth.keys import Key
from gateway.config.schema import AdminConfig, AuthConfig, TlsConfig

ROOT = Path(__file__).resolve().parents[2]
KEYS = (ROOT / "docs/keys.md").read_text()
SECURITY = (ROOT / "docs/security.md").read_text()


@pytest.mark.parametrize(
    ("section", "struct", "page"),
    [("auth", AuthConfig, KEYS), ("admin", AdminConfig, SECURITY), ("tls", TlsConfig, SECURITY)],
)
def test_every_key_is_there(section: str, struct: type[msgspec.Struct], page: str) -> None:
    assert [name for name in struct.__struct_fields__ if f"`{section}.{name}`" not in page] == []


def test_every_field_of_a_key_is_there() -> None:
    assert [name for name in Key.__struct_fields__ if not re.search(rf"^[- ] {name}:", KEYS, re.MULTILINE)] == []


def test_figures_and_outcomes_are_those_of_the_code() -> None:
    assert f"The first {MOST_TENANTS} tenants" in KEYS
    assert all(outcome in KEYS for outcome in OUTCOMES)


def test_what_is_said_to_show_it_is_there() -> None:
    for path in re.findall(r"`((?:gateway|tests)/[\w/.]+)`", SECURITY + KEYS):
        assert (ROOT / path).exists(), path
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", SECURITY):
        assert f"def {name}(" in tests, name
