"""How handoffs are made, and what all of them share."""

from __future__ import annotations

import msgspec

from gateway.config.schema import PdConfig


class HandoffSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`lease_s` is how long a prefill worker keeps a prompt's blocks unasked (vLLM's kv_lease_duration); the decode
    request must be written `margin_s` before its end, as what is read later may be somebody else's blocks.
    """

    lease_s: float = 30.0
    margin_s: float = 5.0
    prefill_timeout_s: float = 120.0
    try_next: bool = True
    """Whether another prefill worker is tried when one fails."""
    then_local: bool = True
    """Whether, after that, the decode worker computes the prompt; else the client gets an error."""
    max_tries: int = 3
    """Prefill workers asked for one request at most."""

    @classmethod
    def from_config(cls, pd: PdConfig) -> HandoffSettings:
        return cls(
            lease_s=pd.lease_s,
            margin_s=pd.lease_margin_s,
            prefill_timeout_s=pd.prefill_timeout_s,
            try_next=pd.on_prefill_failure.startswith("next"),
            then_local=pd.on_prefill_failure.endswith("local"),
        )
