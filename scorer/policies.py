"""Ways to choose among priced workers: ours, and the ones to compare it with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

TIE_S = 0.0005
"""Predictions closer than this are the same prediction."""


class Offer(msgspec.Struct, gc=False):
    """One rank that could serve the request, as a policy sees it."""

    position: int
    total_s: float
    requests: int
    cached_tokens: int
    turn: int
    """How many requests ago the rank was last chosen: larger is longer ago."""


Policy = Callable[[Sequence[Offer], random.Random], Offer]


def warmroute(offers: Sequence[Offer], rng: random.Random) -> Offer:
    """The lowest predicted cost; among equals the least loaded, then the one that has most of it cached, then any.

    Short prompts cost the same cached or not (a prefill step has a floor), but new blocks push others out.
    """
    best = min(offer.total_s for offer in offers) + TIE_S
    equal = [offer for offer in offers if offer.total_s <= best]
    least = min(offer.requests for offer in equal)
    return longest_prefix([offer for offer in equal if offer.requests == least], rng)


def round_robin(offers: Sequence[Offer], rng: random.Random) -> Offer:
    """The one whose turn is longest ago."""
    return max(offers, key=lambda offer: offer.turn)


def pick_random(offers: Sequence[Offer], rng: random.Random) -> Offer:
    return rng.choice(offers)


def least_load(offers: Sequence[Offer], rng: random.Random) -> Offer:
    """The fewest requests in flight; among equals any."""
    least = min(offer.requests for offer in offers)
    return rng.choice([offer for offer in offers if offer.requests == least])


def longest_prefix(offers: Sequence[Offer], rng: random.Random) -> Offer:
    """The most cached tokens, whatever the load; among equals the least loaded."""
    most = max(offer.cached_tokens for offer in offers)
    return least_load([offer for offer in offers if offer.cached_tokens == most], rng)


POLICIES: dict[str, Policy] = {
    "warmroute": warmroute,
    "round-robin": round_robin,
    "random": pick_random,
    "least-load": least_load,
    "longest-prefix": longest_prefix,
}
