"""What two engines must have in common before one can fetch the other's KV. One table, for the gateway and doctor.

NixlConnector compares a hash of these when two engines shake hands (vLLM 0.32: version, model path, dtype, KV heads,
layers, attention backend, KV cache dtype, hybrid manager, draft model, transfer mode), and refuses for any difference;
then it looks at block sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.engine.settings import Settings


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as far as it tells. `hands_over`: whether it counts NIXL transfers, so has the connector."""

    name: str
    version: str | None = None
    model_path: str | None = None
    kv_cache_dtype: str | None = None
    """None for "auto" too, which may be any."""
    block_size: int | None = None
    hands_over: bool | None = None
    settings: Settings | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`what` differs: `prefill` has one value, `decode` another."""

    what: str
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"different {self.what}: {self.prefill} and {self.decode}"


def differences(prefill: Side, decode: Side) -> Iterator[Difference]:
    """Everything for which the two engines refuse each other; what one of them does not tell is no difference."""
    ours, theirs = prefill.settings or Settings(), decode.settings or Settings()
    for what, one, other in (
        ("vLLM versions", prefill.version, decode.version),
        ("model paths", prefill.model_path, decode.model_path),
        ("KV cache types", prefill.kv_cache_dtype, decode.kv_cache_dtype),
        ("model types", ours.dtype, theirs.dtype),
        ("attention backends", ours.attention_backend, theirs.attention_backend),
        ("draft models", ours.draft, theirs.draft),
        ("hybrid KV cache managers", _on(ours.hybrid_manager), _on(theirs.hybrid_manager)),
        ("transfer modes", ours.transfer_mode, theirs.transfer_mode),
        ("NIXL backends", ours.backends, theirs.backends),
        ("cross-layer blocks", _on(ours.cross_layer_blocks), _on(theirs.cross_layer_blocks)),
    ):
        if one is not None and other is not None and one != other:
            yield Difference(what=what, prefill=one, decode=other)
    if prefill.block_size and decode.block_size and decode.block_size % prefill.block_size:
        what = "block sizes (who decodes needs a multiple)"
        yield Difference(what=what, prefill=str(prefill.block_size), decode=str(decode.block_size))


def without_connector(prefill: Side, decode: Side) -> str | None:
    """The one of the two that has no NIXL connector while the other has: of the same version, it would say so too."""
    for side, peer in ((prefill, decode), (decode, prefill)):
        if side.hands_over is False and peer.hands_over:
            return side.name
    return None


def _on(value: bool | None) -> str | None:
    return None if value is None else "on" if value else "off"
