"""Why targets are missed, by name, where that is known: shown beside those that are, and only there."""

from __future__ import annotations

from typing import Final

_PULLS: Final = (
    "the clairvoyant arm fetches bare prefixes from other engines at 87 GB/s, which NIXL cannot do: there the source"
    " has to be asked for the whole prompt; the one that knows as much and fetches nothing (clairvoyant-local)"
    " is no faster than ours"
)

WHY: Final[dict[str, str]] = {
    "1 mooncake x1, clairvoyant": _PULLS,
    "1 mooncake x1.5, clairvoyant": _PULLS,
    "2 sglang batch, shuffled": (
        "the goal is the makespan of a batch, a price is the seconds of requests: all 16 of a group stay with the "
        "engine that computed its prefix, since computing it again would cost each of 128 that wait there 0.1 s, "
        "so that engines get 7 to 9 groups and the last one decides. Rules that leave an engine once its queue is long "
        "do better in this cell (sticky, dynamo), and worse where requests come over time"
    ),
    "5 azure, static split": (
        "four engines that never pause and always decode in full batches do 89.2 requests a second, of which the goal"
        " is 94 %; 2P2D could do 78.3 and does 82 % of it, as it is nearly balanced: 1,155 prompt tokens take 26 ms of"
        " a prefill engine and 211 answer tokens 19 ms of a decode engine at its 128 streams. Who comes as near to"
        " the whole fleet's limit as that split to its own gains 1.14"
    ),
    "4 append prefill, TTFT": (
        "the goal, 22 ms, is less than the same turns take with the fleet to themselves, 26 ms (front end 8 ms, the"
        " shortest prefill step 12 ms, the question's tokens), so that no router can meet it; beside others none gets"
        " below 0.46 (aggregated, ppd, local). Ours is further off: its price does not see a difference, since the same"
        " turns end as early either way (mean E2E as ppd's, TPOT half a per cent better), and it sends many of them"
        " away, which take as long as always-remote's"
    ),
    "4 append prefill, whole KV moved, TTFT": (
        "the goal was published for a connector that moves the whole prompt's KV each turn; at 40 GB/s that is 4 of"
        " always-remote's 67 ms, so that the goal is 24 ms, still less than the 26 ms that the same turns take with the"
        " fleet to themselves: what else its always-remote took so long for was not published"
    ),
}
