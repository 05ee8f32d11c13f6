"""Every code that doctor knows. `docs/doctor.md` shows this table; a test holds the two together.

What concerns prefill and decode workers is in catalogue_pd.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.doctor.catalogue_pd import PD_RULES
from gateway.doctor.findings import Finding, Rule, Severity

_OK, _NOTE, _WARNING, _ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR
_EVENTS_FLAG = (
    """start vLLM with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","""
    """"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'"""
)

RULES: dict[str, Rule] = {
    # ---- can it be reached, and is it vLLM ----
    "reachable": Rule(_OK, "The server answers and is a vLLM version that is supported."),
    "unreachable": Rule(
        _ERROR,
        "Nothing can be sent to this worker.",
        "check host and port of the URL, vllm serve --host, and firewalls",
    ),
    "timeout": Rule(
        _ERROR,
        "A worker that does not answer here will stall requests.",
        "check the server's log, or raise --timeout-s",
    ),
    "tls-failed": Rule(
        _ERROR,
        "No connection without a TLS handshake.",
        "use http:// if vllm serve has no --ssl-certfile, else add its CA to the trust store (SSL_CERT_FILE)",
    ),
    "not-http": Rule(
        _ERROR,
        "The gateway speaks HTTP to workers.",
        "give the port of vllm serve --port (not the event port), or https:// if it has --ssl-certfile",
    ),
    "not-vllm": Rule(
        _ERROR,
        "Cache-aware routing needs vLLM's own server, not something in front of it.",
        "give the URL of vllm serve itself, without a path",
    ),
    "unauthorized": Rule(
        _ERROR,
        "Models cannot be listed and prompts cannot be sent.",
        "set the environment variable VLLM_API_KEY to the key of vllm serve --api-key",
    ),
    "unhealthy": Rule(
        _ERROR, "The engine behind the server is dead; it fails every request.", "read its log and restart vllm serve"
    ),
    "asleep": Rule(
        _ERROR,
        "A sleeping engine serves nothing and has lost its cache.",
        "POST /wake_up to it, or take it out of the fleet",
    ),
    "version-unsupported": Rule(
        _ERROR, "Its events and metrics differ from what the gateway reads.", "upgrade to vLLM 0.11 or later"
    ),
    "version-newer": Rule(
        _NOTE, "Newer than any version that was tested; formats may have changed.", "heed the probe's findings"
    ),
    "version-unknown": Rule(
        _NOTE, "Whether it is supported cannot be told.", "serve a released vLLM, or heed the probe's findings"
    ),
    "clock-skew": Rule(
        _NOTE,
        "Nothing compares times of two machines, but logs and traces will not line up.",
        "synchronise the clocks (NTP, chrony)",
    ),
    "check-incomplete": Rule(
        _ERROR,
        "What was not examined may be broken as well.",
        "see the findings above it; raise --timeout-s if the server is only slow",
    ),
    "check-failed": Rule(_ERROR, "doctor itself failed in one check; the other checks stand.", "report it as a bug"),
    # ---- models ----
    "models": Rule(_OK, "What the server serves."),
    "models-unreadable": Rule(
        _ERROR, "Requests are routed by model name.", "check that GET /v1/models answers on this port"
    ),
    # ---- metrics ----
    "metrics": Rule(_OK, "Load, block size and KV capacity can be read."),
    "metrics-unreadable": Rule(
        _WARNING,
        "Load, block size, KV capacity and restarts are invisible; prices rest on what the gateway itself sent.",
        "make GET /metrics reachable (do not pass --disable-log-stats, let no proxy hide it)",
    ),
    "prefix-caching-off": Rule(
        _ERROR,
        "The engine keeps no KV blocks between requests, so no worker is ever warm and no events are sent.",
        "remove --no-enable-prefix-caching from vllm serve (or pass --enable-prefix-caching)",
    ),
    "prefix-caching-unknown": Rule(
        _NOTE, "The metrics do not say whether prefix caching is on.", "pass --enable-prefix-caching to be sure"
    ),
    # ---- KV events ----
    "events": Rule(_OK, "A random prompt was announced, predicted from our index and reused as predicted."),
    "events-off": Rule(
        _WARNING, "No events: routing will guess from what it sent, and cannot see evictions.", _EVENTS_FLAG
    ),
    "events-unannounced": Rule(
        _WARNING,
        "Where events are published cannot be learned; without an address routing will guess from what it sent.",
        "pass --events tcp://HOST:PORT (and configure the same for the gateway), or upgrade vLLM",
    ),
    "events-unreachable": Rule(
        _ERROR,
        "Events exist but none will arrive; routing will guess from what it sent.",
        'use "endpoint":"tcp://*:PORT" in --kv-events-config (not a loopback address or ipc://) and open PORT '
        "(PORT + rank with data parallelism)",
    ),
    "events-wrong-port": Rule(
        _ERROR,
        "The address is open, but no event publisher answers there.",
        'compare --events with "endpoint" in --kv-events-config (not "replay_endpoint", not the HTTP port)',
    ),
    "events-need-bind": Rule(
        _WARNING,
        "The engine does not listen for subscribers but connects somewhere, and this gateway is not set up to be "
        "there: routing will guess from what it sent.",
        "run the gateway with --events-mode bind --events-bind-endpoint tcp://0.0.0.0:PORT, or give the engine an "
        '"endpoint" with a star ("tcp://*:PORT") in --kv-events-config',
    ),
    "events-bind-failed": Rule(
        _WARNING,
        "The engine connects to this address, and doctor could not listen there.",
        'stop the gateway that listens there while doctor runs, or use "endpoint":"tcp://*:PORT"',
    ),
    "events-silent": Rule(
        _ERROR,
        "A prompt was served but nothing was announced: this worker will look cold for ever.",
        'check "publisher":"zmq" and "enable_kv_cache_events":true; hybrid models may publish nothing in older vLLM',
    ),
    "events-undelivered": Rule(
        _ERROR,
        "The engine published the batch (a replay has it) but it did not come here live.",
        'raise "hwm" in --kv-events-config, and check the network and other subscribers',
    ),
    "events-gap": Rule(
        _WARNING,
        "Batches were lost on the way; each gap costs a replay, and without one the index is incomplete.",
        'raise "hwm" in --kv-events-config, and check the network',
    ),
    "events-unmatched": Rule(
        _ERROR,
        "Events arrive, but a prompt that was just computed is not found by them: every lookup will miss.",
        "check that --events belongs to this very server, and that nothing rewrites prompts on the way",
    ),
    "events-incomplete": Rule(
        _WARNING,
        "Only a part of the prompt was announced, so hits will be underestimated.",
        "raise --timeout-s to rule out a slow stream",
    ),
    "extra-keys": Rule(
        _ERROR,
        "The engine mixes extra keys (an adapter, a salt) into plain prompts, so plain lookups miss.",
        "serve the base model under its own name; let nothing between gateway and engine set cache_salt",
    ),
    "block-size-differs": Rule(
        _NOTE, "Routing goes by the block size of the events; capacity figures go by the metrics.", "nothing"
    ),
    "events-malformed": Rule(
        _WARNING,
        "Blocks named in events that cannot be read are missing from the index.",
        "report it with the vLLM version; something else may be publishing to this port",
    ),
    "block-size-refused": Rule(
        _WARNING,
        "Blocks of a lower tier in finer pieces than the GPU's cannot be followed; that tier looks empty.",
        "give the offloading connector the engine's --block-size, or a multiple of it",
    ),
    "events-unknown-type": Rule(
        _NOTE, "Events of a type that this version does not know are skipped.", "upgrade warmroute if the code is newer"
    ),
    "groups-ignored": Rule(
        _NOTE,
        "Sliding-window, Mamba and other hybrid groups do not prove a full prefix and are left out; that is intended.",
        "nothing",
    ),
    "no-full-attention": Rule(
        _WARNING,
        "No group of this model proves a full prefix, so its cache cannot be followed.",
        "expect routing by load only for this model",
    ),
    "copies-stay": Rule(
        _WARNING,
        "The index holds more blocks than the engine has: removals are missing, so hits are overestimated.",
        "set index.removal_mode to logical, and see events-gap and the replay findings",
    ),
    # ---- data-parallel ranks ----
    "rank-silent": Rule(
        _ERROR,
        "This rank serves prompts but announces nothing, while others do; it will look cold for ever.",
        "let each rank publish at a port of its own (tcp://*:PORT counts up by rank; ipc:// cannot)",
    ),
    "rank-mixed": Rule(
        _ERROR,
        "Blocks of one rank are credited to another.",
        "pair each rank with its own endpoint and replay_endpoint (PORT + rank)",
    ),
    "rank-ignored": Rule(
        _WARNING,
        "Another rank than the one that was asked for computed the prompt, so ranks cannot be chosen.",
        "pass X-data-parallel-rank through; do not put another balancer in front of the ranks",
    ),
    "rank-unannounced": Rule(
        _WARNING,
        "Ranks without an event address look cold.",
        "give each rank an event port (tcp://*:PORT), and open PORT + rank",
    ),
    # ---- replay ----
    "replay": Rule(_OK, "The history of events can be read, so lost batches and late starts are made up for."),
    "replay-off": Rule(
        _WARNING,
        "What is lost, or was stored before the gateway started, stays unknown.",
        'add "replay_endpoint":"tcp://*:5657" to --kv-events-config',
    ),
    "replay-unreachable": Rule(
        _WARNING,
        "What is lost, or was stored before the gateway started, stays unknown.",
        'open the port of "replay_endpoint" (PORT + rank with data parallelism), or correct --replay',
    ),
    "replay-incomplete": Rule(
        _WARNING,
        "The answer broke off before its end marker, so gaps stay open.",
        "check the network to the replay port, or raise --timeout-s",
    ),
    "replay-foreign": Rule(
        _WARNING,
        "The replay endpoint seems to belong to another engine; what it answers is thrown away.",
        "pair each event endpoint with its own replay endpoint",
    ),
    "replay-short": Rule(
        _NOTE,
        "The engine no longer has its first batches; blocks stored then are unknown to a gateway that starts now.",
        'raise "buffer_steps" in --kv-events-config',
    ),
    # ---- probing ----
    "probe-skipped": Rule(
        _NOTE, "No prompt was sent, so events and reuse were not verified.", "run doctor without --no-probe"
    ),
    "probe-failed": Rule(
        _ERROR,
        "A plain completion of a few hundred random tokens could not be served.",
        "try the same with curl; see the server's log",
    ),
    "cached-tokens-missing": Rule(
        _WARNING,
        "Predictions cannot be compared with what the engine really reused, so they are not corrected.",
        "start vLLM with --enable-prompt-tokens-details",
    ),
    "cached-tokens-differ": Rule(
        _WARNING,
        "The engine reused another number of tokens than the index predicted.",
        "repeat on an idle server; if it stays, report it with the vLLM version and --kv-cache settings",
    ),
    "cache-not-reused": Rule(
        _ERROR,
        "The same prompt sent twice in a row was computed twice, so nothing is gained by routing to it.",
        "check --enable-prefix-caching and that the KV cache is not too small for the load",
    ),
    # ---- tokenizer ----
    "tokenizer": Rule(_OK, "The local tokenizer makes the engine's very token ids."),
    "tokenizer-mismatch": Rule(
        _WARNING,
        "Prompts tokenised here would never meet the engine's blocks; the gateway will ask the engine instead.",
        "give the directory that vllm serve loads (--tokenizer), and the same --chat-template",
    ),
    "tokenizer-unusable": Rule(
        _WARNING,
        "Without a local tokenizer each text prompt costs a call to the engine.",
        "give a model directory with tokenizer.json",
    ),
    "tokenizer-unchecked": Rule(
        _NOTE,
        "Text prompts will be tokenised by the engine's /tokenize, which costs a call each.",
        "pass --tokenizer PATH of a local copy of the model's tokenizer",
    ),
    "tokenize-unavailable": Rule(
        _WARNING,
        "The local tokenizer cannot be verified, and without one text prompts are only estimated.",
        "make POST /tokenize reachable on this server",
    ),
    # ---- several workers ----
    "url-twice": Rule(_WARNING, "The same worker would be counted twice.", "list each worker once"),
    "same-server": Rule(
        _WARNING, "Two URLs that lead to one server double its capacity on paper.", "list each server once"
    ),
    "event-endpoint-shared": Rule(
        _ERROR,
        "Blocks of one worker would be credited to the other.",
        "give each server an event port of its own in --kv-events-config",
    ),
    "topic-shared": Rule(
        _ERROR,
        "Engines that connect to one address are told apart by topic alone.",
        'give each server a "topic" of its own, e.g. "kv@HOST:PORT@MODEL"',
    ),
    "topic-missing": Rule(
        _ERROR,
        "Engines that connect to one address are told apart by topic, and this one has none.",
        'set "topic" in --kv-events-config, e.g. "kv@HOST:PORT@MODEL"',
    ),
    "models-differ": Rule(_NOTE, "Each request can only go to the workers of its model.", "nothing, if it is intended"),
    "max-model-len-differs": Rule(
        _WARNING,
        "A long prompt is refused by one worker and taken by the other.",
        "start all workers of a model with the same --max-model-len",
    ),
    "roots-differ": Rule(
        _NOTE,
        "The same model name stands for different weights or paths.",
        "check that --model is the same checkpoint; KV hand-off compares the path as well",
    ),
    "versions-differ": Rule(
        _NOTE,
        "Routing works across versions, whatever the format of their events; KV hand-off between them does not.",
        "roll all to one version",
    ),
    "block-sizes-differ": Rule(
        _NOTE, "Routing works across block sizes; hits are counted in each worker's own blocks.", "nothing"
    ),
    "clocks-differ": Rule(
        _NOTE, "Nothing compares times of two engines, but their logs will not line up.", "synchronise the clocks (NTP)"
    ),
    # ---- a running gateway (--admin) ----
    "gateway": Rule(_OK, "The gateway sees nothing that is not as it should be."),
    "gateway-unreachable": Rule(
        _ERROR,
        "What the gateway sees of its fleet cannot be read.",
        "give the address of its admin port (gateway.admin_host, gateway.admin_port; 8001), not that of its main port; "
        "set WARMROUTE_ADMIN_TOKEN if it has a token",
    ),
    "gateway-degraded": Rule(
        _WARNING,
        "Something makes the gateway's decisions worse than they could be.",
        "see Warnings on the page at /debug of its admin port, and the other findings about that worker",
    ),
    "gateway-hits-missed": Rule(
        _WARNING,
        "The engine finds less in its cache than its events promised: the cache was emptied while it was idle, or "
        "removals do not arrive.",
        "reset caches through the gateway (POST /reset_prefix_cache there), and see events-gap and copies-stay",
    ),
    **PD_RULES,
}


def finding(
    code: str, worker: str, sentence: str, *, rank: int | None = None, evidence: Mapping[str, Any] | None = None
) -> Finding:
    """A finding with the severity, meaning and fix of its code. `evidence` must be JSON's kinds of values."""
    rule = RULES[code]
    # names come from servers: nothing in them may steer a terminal or break a line
    sentence = "".join(char if char.isprintable() else "?" for char in sentence)
    return Finding(
        severity=rule.severity,
        code=code,
        worker=worker,
        sentence=sentence,
        meaning="" if rule.severity is Severity.OK else rule.meaning,
        fix=rule.fix,
        rank=rank,
        evidence=evidence or {},
    )
