"""Header blocks of a client (RFC 7541), those of proxies being nearly all equal."""

from __future__ import annotations

import hpack

from gateway.extproc.http2 import frames

Fields = tuple[tuple[str, str], ...]

_MOST_KNOWN, _KNOWN_BYTES, _KNOWN_FIELDS = 256, 2048, 64
"""Blocks that are decoded once; longer ones, or of more fields, always are."""


class HeaderBlocks:
    """Of one connection, in their order, each of up to `most_bytes` when decoded. Without a header table equal blocks
    mean equal fields; with one in use a block may depend on others, and others on it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=most_bytes)
        self._known: dict[bytes, Fields] = {}

    def fields(self, block: bytes) -> Fields:
        """Raises Fault: what follows on the connection could not be read either."""
        known = self._known.get(block) if self._decoder.header_table_size == 0 else None
        if known is not None:
            return known
        try:
            fields = tuple((_text(name), _text(value)) for name, value in self._decoder.decode(block, raw=True))
        except hpack.HPACKError:
            raise frames.Fault(frames.COMPRESSION_ERROR, "headers cannot be read") from None
        small = len(block) <= _KNOWN_BYTES and len(fields) <= _KNOWN_FIELDS
        if small and self._decoder.header_table_size == 0:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[block] = fields
        return fields


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode("latin-1")
