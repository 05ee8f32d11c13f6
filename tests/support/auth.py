"""API keys for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.auth.keys import Key, digest_of, new_key


def made(tenant: str = "acme", **fields: Any) -> tuple[str, Key]:
    """(a new key, its entry)"""
    key = new_key()
    return key, Key(tenant=tenant, sha256=digest_of(key).hex(), **fields)


def write_keys(file: Path, *keys: Key) -> None:
    entries = [
        {name: value for name in Key.__struct_fields__ if (value := getattr(key, name)) is not None} for key in keys
    ]
    file.write_text(json.dumps({"keys": entries}))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
