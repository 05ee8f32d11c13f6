"""What to do about each degradation, in one line; `/readyz?verbose` says what it is."""

from __future__ import annotations

REMEDIES = {
    "discovery": "mend what the text names; the workers known so far stay",
    "no_workers": "name workers with --worker URL, workers_file or discovery.dns",
    "no_decode_worker": "start a worker that decodes (role both or decode), or wait for one to come back",
    "no_prefill_worker": "start a prefill worker, or set pd.policy: local if none is wanted",
    "worker_draining": "nothing, if it is being updated; else: warmroute workers undrain NAME",
    "worker_asleep": "POST /wake_up?worker=NAME on this port when it is needed",
    "worker_ejected": "look at the engine's log; it is probed, and comes back by itself once it answers",
    "worker_suspected": "look at the engine's log if it stays so",
    "worker_down": "start the engine, or mend its address or the network between",
    "models_unknown": "see whether /v1/models of the engine answers, and whether it wants an API key",
    "stats_missing": "see whether /metrics of the engine answers, and whether it wants an API key",
    "stats_stale": "see whether /metrics of the engine answers in time",
    "prefix_caching_off": "start the engine without --no-enable-prefix-caching",
    "pair_broken": "warmroute doctor on both workers says why they refuse each other",
    "transfers_failing": "warmroute doctor on both workers of the pair; then the engines' logs",
    "events_missing": "start the engine with --kv-events-config (README), or name events: in the configuration",
    "events_disconnected": "open the port of the KV events to this host, or mend the endpoint",
    "events_catching_up": "nothing; it ends by itself",
    "events_partial": "set replay_endpoint in --kv-events-config, so that gaps can be filled",
    "events_silent": "warmroute doctor on that worker says where its events go",
    "events_refused": "give lower tiers the GPU's block size",
    "replay_missing": "set replay_endpoint in --kv-events-config",
    "tokens_estimated": "give --tokenizer PATH, or let the engine's /tokenize answer",
    "tokens_by_engine": "give --tokenizer PATH to tokenise here, which is faster",
    "tokens_slow": "nothing has to be done; docs/tokens.md says why",
    "learning_not_kept": "make the folder of learning.file writable",
    "queue_filling": "add workers, or lower what is let in (docs/queue.md)",
    "hits_missed": "reset caches through this port (POST /reset_prefix_cache), and see events_partial",
}
