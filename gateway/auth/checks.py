"""What must be read of a body without a doubt, since a key forbids something in it.

Where our reader and the engine's could understand a body differently, it is refused: only keys with limited models or
priorities come here.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from multidict import CIMultiDict

from gateway import form
from gateway.bad_request import BadRequest
from gateway.handoff.bodies import is_takeable
from gateway.handoff.fields import NotAnObject, looks_like_object, split
from gateway.proxy.headers import is_encoded

PRIORITY_HEADER = "x-vllm-priority"
_DISPOSITION = re.compile(rb"content-disposition[^\r\n]*", re.IGNORECASE)
_NAMES_MODEL = re.compile(rb"(?<![a-z])name\*?\s*=\s*[\"']?\s*model(?![\w-])", re.IGNORECASE)


def named_in_form(headers: CIMultiDict[str], body: bytes) -> str | None:
    """The model that a form names; None: it is no form. Raises BadRequest where an engine might read another one."""
    if is_encoded(headers):
        raise BadRequest("A compressed request body cannot be checked against your API key.", code="not_readable")
    types: list[str] = headers.getall("content-type", [])
    if not any(each[:10].lower() == "multipart/" for each in types):
        return None
    if len(types) > 1 or types[0].lower().count("boundary") != 1:
        raise BadRequest("The form has more than one content type or boundary.", code="not_readable")
    rows = _DISPOSITION.findall(body)
    if any(b"\\" in row for row in rows) or sum(len(_NAMES_MODEL.findall(row)) for row in rows) != 1:
        raise BadRequest("The form must name one model.", param="model", code="not_readable")
    model = form.fields(types[0], body, frozenset({"model"}), whole=True).get("model")
    if model is None:
        raise BadRequest("The form must name its model in a field of its own.", param="model", code="not_readable")
    return model


def member_of(body: bytes, name: str) -> Any:
    """A member of the JSON object in `body`; None: it has none, or is no object. Raises BadRequest."""
    if not body or not looks_like_object(body):
        return None
    if not is_takeable(body):
        raise BadRequest("The request body has too many members.", code="invalid_json")
    try:
        raw = split(body).get(name)
        return None if raw is None else msgspec.json.decode(raw)
    except (NotAnObject, msgspec.MsgspecError, UnicodeError, RecursionError):
        raise BadRequest("The request body is not a valid JSON object.", code="invalid_json") from None
