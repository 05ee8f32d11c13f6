"""What a Match asks for, checked."""

from __future__ import annotations

from gateway.indexservice.wire import WireError, little_endian, unpacked
from gateway.pb import indexer_pb2 as pb
from indexer import MediaSpan, Prompt
from indexer.ingest import MAX_BLOCK_SIZE

MOST_TOKENS = 1 << 20
MOST_KEYS = 1 << 17
_MOST_MEDIA = 4096


class BadQuestion(ValueError):
    """Says what to ask instead."""


def prompt_of(request: pb.MatchRequest) -> Prompt:
    """Raises BadQuestion."""
    if bool(request.token_ids) == bool(request.block_keys):
        raise BadQuestion("give either token_ids or block_keys")
    if request.block_keys:
        return _keyed(request)
    if len(request.token_ids) > 4 * MOST_TOKENS:
        raise BadQuestion(f"a prompt has at most {MOST_TOKENS} tokens")
    if len(request.media) > _MOST_MEDIA:
        raise BadQuestion(f"a prompt has at most {_MOST_MEDIA} media items")
    spans = [MediaSpan(it.id, it.start_token, it.n_tokens) for it in request.media] or None
    try:
        tokens = little_endian(request.token_ids)
    except WireError as exc:
        raise BadQuestion(str(exc)) from None
    return Prompt(tokens, cache_salt=request.cache_salt or None, extra_keys=spans)


def _keyed(request: pb.MatchRequest) -> Prompt:
    if request.cache_salt or request.media:
        raise BadQuestion("block_keys have the salt and the media in them: give those with token_ids only")
    if not 0 < request.block_size <= MAX_BLOCK_SIZE:
        raise BadQuestion(f"with block_keys, block_size is a number of tokens from 1 to {MAX_BLOCK_SIZE}")
    if len(request.block_keys) > 8 * MOST_KEYS:
        raise BadQuestion(f"a prompt has at most {MOST_KEYS} block keys")
    try:
        return Prompt.of_keys(unpacked(request.block_keys), request.block_size)
    except WireError as exc:
        raise BadQuestion(str(exc)) from None
