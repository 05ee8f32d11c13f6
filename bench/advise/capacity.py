"""How much KV a fleet holds: prefill servers hold none of the conversations that go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """`kv_tokens` of one server; `context_tokens` of one conversation."""

    kv_tokens: int
    context_tokens: int

    @property
    def per_server(self) -> int:
        """Conversations one server holds in full."""
        return self.kv_tokens // self.context_tokens

    def conversations(self, servers: int, prefill: int = 0) -> int:
        """Of so many servers, `prefill` of which only compute prompts."""
        return self.per_server * (servers - prefill)
