"""Text to token ids: ids given in the request, a local tokenizer, the engine's ``/tokenize``, or an estimate.

given.py        body -> prompts, and ids the client gave     convert.py       /v1/messages, /v1/responses -> chat
conversation.py messages -> what a template sees             content_format.py  does a template walk over parts?
template.py     one compiled chat template                   render.py        chat -> prompt text
local.py        a tokenizer on disk                          worker.py, cache.py  its threads and its memory
engine.py       the engine's ``/tokenize``                   breaker.py       when not to ask it
selfcheck.py    what local and engine must agree on          estimate.py      when nobody knows
model.py        the sources of one model, in order           service.py       the face of this room
"""

from gateway.tokens.engine import aiohttp_tokenize
from gateway.tokens.service import TokenService
from gateway.tokens.settings import TokenSettings
from gateway.tokens.types import EngineTokenize, Reason, Source, Tokens

__all__ = ["EngineTokenize", "Reason", "Source", "TokenService", "TokenSettings", "Tokens", "aiohttp_tokenize"]
