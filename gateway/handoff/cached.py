"""One meaning of cached tokens on every path: prompt tokens that no engine had to compute for this request.

The decode worker of a handoff had the whole prompt computed elsewhere and may count it as cached; what really was
cached is what the prefill worker found. Only that number changes in an answer: the bytes around it stay, and a stream
is held back no longer than until a line's end shows whether there is a usage in it.
"""

from __future__ import annotations

import re

import msgspec

from gateway.handoff.fields import Fields, NotAnObject, split, with_member

MOST_HELD_BYTES = 8 << 20
"""A line longer than this passes as it is."""

_LINE_END = re.compile(rb"[\r\n]")
_DATA = re.compile(rb"data:[ \t]*")
_USAGE = b'"usage"'
_AROUND = {"responses": "response", "messages": "message"}
"""What a usage is inside of, in some events of the API's streams. That of a message's start tells the prompt's length
only.
"""
_DETAILS = {"responses": "input_tokens_details"}
_NUMBER = re.compile(rb"-?\d{1,18}")
_CHOICES = re.compile(rb"\[\s*\]|null")


class CachedTokens:
    """Corrects one answer of the API `kind`: `whole`, or a stream by `feed` and `end`.

    `cached_tokens` is the prefill worker's number, None if it told none (then 0 stands where the decode worker tells
    one). `add_absent`: also where the decode worker tells none, in the answer's last usage.
    """

    __slots__ = ("_add_absent", "_cached_tokens", "_details", "_held", "_kind", "_passing", "_prompt")

    def __init__(self, kind: str, cached_tokens: int | None, *, add_absent: bool = True) -> None:
        self._kind = kind
        self._cached_tokens = max(0, cached_tokens or 0)
        self._add_absent = add_absent and cached_tokens is not None
        self._details = _DETAILS.get(kind, "prompt_tokens_details")
        self._prompt = "input_tokens" if kind == "responses" else "prompt_tokens"
        self._held = bytearray()
        self._passing = False

    def whole(self, body: bytes) -> bytes:
        """A JSON answer. What is none comes back as it is."""
        return self._checked(body, in_stream=False)

    def feed(self, piece: bytes) -> bytes:
        """What can go on now."""
        if not self._held and not self._passing and piece.endswith((b"\n", b"\r")) and _USAGE not in piece:
            return piece
        out: list[bytes] = []
        at = 0
        while at < len(piece):
            found = _LINE_END.search(piece, at)
            end = len(piece) if found is None else found.end()
            part, at = piece[at:end], end
            if self._passing:
                out.append(part)
                self._passing = found is None
                continue
            self._held += part
            if found is not None:
                line = self._taken()
                out.append(line if len(line) > MOST_HELD_BYTES else self._line(line))
            elif not _may_carry(self._held):
                out.append(self._taken())
                self._passing = True
        return b"".join(out)

    def end(self) -> bytes:
        """What was held back when the stream ended."""
        return self._line(self._taken())

    def _taken(self) -> bytes:
        held = bytes(self._held)
        self._held.clear()
        return held

    def _line(self, line: bytes) -> bytes:
        start = _DATA.match(line)
        if start is None:
            return line
        data = line[start.end() :].rstrip(b" \t\r\n")
        checked = self._checked(data, in_stream=True)
        return line if checked is data else line[: start.end()] + checked + line[start.end() + len(data) :]

    def _checked(self, body: bytes, *, in_stream: bool) -> bytes:
        """`body` itself if it is right, or nothing we know."""
        if _USAGE not in body:
            return body
        try:
            fields = split(body)
            around = _AROUND.get(self._kind, "")
            if "usage" in fields:
                last = not in_stream or "choices" not in fields or bool(_CHOICES.fullmatch(fields["choices"]))
                return self._member(body, fields, "usage", add=self._add_absent and last)
            if around not in fields:
                return body
            inner = bytes(fields[around])
            checked = self._member(inner, split(inner), "usage", add=self._add_absent and around == "response")
            return body if checked is inner else with_member(body, around, checked)
        except NotAnObject:
            return body

    def _member(self, body: bytes, fields: Fields, name: str, *, add: bool) -> bytes:
        usage = bytes(fields.get(name, b"null"))
        if usage == b"null":
            return body
        correct = self._message_usage if self._kind == "messages" else self._usage
        checked = correct(usage, split(usage), add=add)
        return body if checked is usage else with_member(body, name, checked)

    def _usage(self, usage: bytes, fields: Fields, *, add: bool) -> bytes:
        prompt = _number(fields.get(self._prompt))
        if prompt is None and self._prompt in fields:
            return usage
        cached = b"%d" % (self._cached_tokens if prompt is None else min(self._cached_tokens, max(0, prompt)))
        details = bytes(fields.get(self._details, b"null"))
        told = b"null" if details == b"null" else bytes(split(details).get("cached_tokens", b"null"))
        add = add and prompt is not None
        if told == cached or (told == b"null" and not add) or (told != b"null" and not _NUMBER.fullmatch(told)):
            return usage
        return with_member(
            usage, self._details, with_member(b"{}" if details == b"null" else details, "cached_tokens", cached)
        )

    def _message_usage(self, usage: bytes, fields: Fields, *, add: bool) -> bytes:
        """Here `input_tokens` are those not read from the cache; the two move together."""
        told = fields.get("cache_read_input_tokens")
        read, apart = _number(told), _number(fields.get("input_tokens"))
        if apart is None or (read is None and (not add or (told is not None and bytes(told) != b"null"))):
            return usage
        total = max(0, apart + (read or 0))
        cached = min(self._cached_tokens, total)
        if read == cached:
            return usage
        usage = with_member(usage, "input_tokens", b"%d" % (total - cached))
        return with_member(usage, "cache_read_input_tokens", b"%d" % cached)


def _number(raw: msgspec.Raw | None) -> int | None:
    return int(bytes(raw)) if raw is not None and _NUMBER.fullmatch(raw) else None


def _may_carry(held: bytearray) -> bool:
    """Whether the rest of a line that begins so may bring a usage."""
    if len(held) > MOST_HELD_BYTES:
        return False
    found = _DATA.match(held)
    if found is None:
        return b"data:".startswith(held)
    return found.end() == len(held) or held[found.end()] == ord("{")
