"""How one input says both what comes and in which pieces."""

from __future__ import annotations

_MOST_CUTS = 15


def cut(data: bytes) -> tuple[bytes, list[bytes]]:
    """(the whole, its pieces): the first byte counts the cuts, each of the next ones is the length of a piece."""
    if not data:
        return b"", []
    n_cuts = data[0] & _MOST_CUTS
    lengths, whole = data[1 : 1 + n_cuts], data[1 + n_cuts :]
    pieces, at = [], 0
    for length in lengths:
        pieces.append(whole[at : at + length])
        at += length
    return whole, [piece for piece in (*pieces, whole[at:]) if piece]


def seeds(*wholes: bytes) -> list[bytes]:
    """Each in one piece and in some."""
    return [head + whole for whole in wholes for head in (b"\0", b"\x05\x01\x10\x02\x50\x07")]


def packed(*messages: bytes) -> bytes:
    """Many messages as one input; `unpacked` has them back."""
    return b"".join(len(message).to_bytes(2, "big") + message for message in messages)


def unpacked(data: bytes, most: int = 64) -> list[bytes]:
    messages: list[bytes] = []
    at = 0
    while at + 2 <= len(data) and len(messages) < most:
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        messages.append(data[at + 2 : end])
        at = end
    return messages
