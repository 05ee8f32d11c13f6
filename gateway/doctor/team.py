"""Workers that hand prompts over, from start to end: tried, asked where they listen, and compared."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

from gateway.config.schema import PdConfig
from gateway.doctor.catalogue import finding
from gateway.doctor.fetch import Http
from gateway.doctor.findings import Finding
from gateway.doctor.handoff import Handoffs
from gateway.doctor.identity import Identity
from gateway.doctor.pairs import Team, able, judge_team, team_of
from gateway.doctor.side_channel import judge_addresses, judge_reach
from gateway.engine.capabilities import EventSource
from gateway.handoff.hosts import Hosts


async def examine_team(
    workers: Sequence[Identity],
    https: Mapping[str, Http],
    pd: PdConfig,
    sources: Mapping[str, Mapping[int, EventSource]],
    found: list[Finding],
    rng: random.Random,
    *,
    probe: bool,
    timeout_s: float,
    deadline_s: float,
) -> None:
    """Add to `found` as it goes. `https` and `sources` by URL; `timeout_s` is of one wait, `deadline_s` of handoffs."""
    team = team_of(workers, pd)
    if team is None:
        return
    found += judge_team(team, workers, pd, sources)
    pairs = [pair for pair in team.pairs if able(*pair)]
    if pairs and probe:
        handoffs = Handoffs(https, rng)
        try:
            async with asyncio.timeout(deadline_s):
                await handoffs.run(pairs)
        except TimeoutError:  # Where engines listen may be why, and is still to be looked at.
            handoffs.found.append(finding("handoff-skipped", "", f"not all pairs were tried within {deadline_s:g} s"))
        finally:
            found += handoffs.found
    elif pairs:
        found.append(finding("handoff-skipped", "", "--no-probe was given"))
    found += await _side_channels(team, timeout_s)


async def _side_channels(team: Team, timeout_s: float) -> list[Finding]:
    sources = [me for me in team.sources if me.hands_over is not False]
    if not sources:
        return []
    found = judge_addresses(sources, [me for me in team.decodes if me.hands_over is not False])
    told = {each.worker for each in found if each.code == "side-channel-local"}
    rest = [me for me in sources if me.url not in told]
    return found + await judge_reach(rest, Hosts(), timeout_s)
