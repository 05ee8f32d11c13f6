"""The codes about prefill and decode workers: pairs, side channels, transfers, leases."""

from __future__ import annotations

from gateway.doctor.findings import Rule, Severity

_OK, _NOTE, _WARNING, _ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR
_CONNECTOR_FLAG = """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""

PD_RULES: dict[str, Rule] = {
    # ---- roles and connectors ----
    "no-decode-worker": Rule(
        _ERROR,
        "Prefill workers answer no client; nothing can be served.",
        "add decode workers (--decode URL), or drop the role",
    ),
    "no-prefill-worker": Rule(
        _WARNING,
        "Every prompt is computed by the worker that answers it.",
        "add prefill workers (--prefill URL), or drop the role decode",
    ),
    "connector": Rule(_OK, "It can hand KV blocks over and fetch them."),
    "connector-missing": Rule(
        _ERROR,
        "Without a KV connector a worker neither hands prompts over nor fetches them; what it is sent is ignored.",
        f"start vLLM with {_CONNECTOR_FLAG}",
    ),
    "connector-unsupported": Rule(
        _ERROR,
        "The gateway hands over through NixlConnector in its pull mode only.",
        f"start vLLM with {_CONNECTOR_FLAG} (NixlPushConnector is another protocol)",
    ),
    "settings-unknown": Rule(
        _NOTE,
        "What engines compare when they shake hands can only be found out by trying, and their lease is believed to be "
        "pd.lease_s.",
        "start vLLM with VLLM_SERVER_DEV_MODE=1 while you check (it opens pages that must not be open for long)",
    ),
    "kv-role": Rule(
        _NOTE,
        "vLLM 0.32 holds no engine to its kv_role; a later one may.",
        'give prefill workers "kv_role":"kv_producer" and decode workers "kv_consumer"',
    ),
    "load-failures-hidden": Rule(
        _NOTE,
        "When a fetch fails the engine computes the prompt itself and answers 200: right, slow, and seen in no answer.",
        'watch warmroute_pd_transfers_failed_total, or set "kv_load_failure_policy":"fail"',
    ),
    "lease-short": Rule(
        _ERROR,
        "Blocks read after their lease has ended give wrong text with status 200, which then stays in the cache. While "
        "the engine tells its lease (in development mode only) the gateway goes by the shorter one.",
        'run the gateway with --pd-lease-s set to the shortest "kv_lease_duration" of its prefill workers',
    ),
    "lease-long": Rule(
        _NOTE,
        "The gateway gives prompts up while they could still be fetched.",
        'run the gateway with --pd-lease-s set to "kv_lease_duration"',
    ),
    "decode-without-events": Rule(
        _WARNING,
        "What such a decode worker holds is guessed from what it was sent, so prompts that it has may be computed "
        "elsewhere, and the other way round.",
        "publish its KV events as for any other worker (see events-off)",
    ),
    # ---- pairs ----
    "pair-incompatible": Rule(
        _ERROR,
        "Engines that differ in this refuse each other when they shake hands; no prompt is handed over.",
        "start both with the same version, --model path, --dtype, --kv-cache-dtype, --block-size, attention backend "
        "and connector options",
    ),
    "peer-incompatible": Rule(
        _NOTE,
        "The two cannot fetch prompts from each other; each serves by itself.",
        "nothing, if it is intended; else start both alike",
    ),
    "pair-block-sizes": Rule(
        _WARNING,
        "Transfers go in blocks of the prefill worker, so smaller ones there cost more descriptors than the decode "
        "worker's would; with a host buffer the two refuse each other.",
        "start both with the same --block-size",
    ),
    "pair-tensor-parallel": Rule(
        _NOTE,
        "Engines refuse that when the prefill worker has more ranks than the model KV heads (vLLM 0.32; not with MLA).",
        "give the decode worker at least the --tensor-parallel-size of the prefill worker",
    ),
    "handoff": Rule(_OK, "A random prompt was computed by one and fetched by the other."),
    "handoff-unseen": Rule(
        _NOTE,
        "The answer came, but whether the prompt was fetched or computed again cannot be told.",
        "make GET /metrics of the decode worker reachable",
    ),
    "handoff-failed": Rule(
        _ERROR,
        "Prompts for this pair end in a second computation, or in an error.",
        "see the side-channel findings; read the decode worker's log for the NIXL handshake",
    ),
    "handoff-no-params": Rule(
        _ERROR,
        "Such a prefill is of no use to anybody.",
        f"start vLLM with {_CONNECTOR_FLAG}; let nothing in front of it drop kv_transfer_params (a sidecar does)",
    ),
    "handoff-bad-params": Rule(
        _ERROR,
        "Parameters that are not exactly right can kill a decode engine, so the gateway uses none of them.",
        "let nothing rewrite the worker's answers; report it with the vLLM version",
    ),
    "handoff-skipped": Rule(
        _NOTE,
        "Pairs that were not tried may still refuse each other.",
        "run doctor on fewer workers, or without --no-probe",
    ),
    # ---- NIXL's side channel ----
    "side-channel": Rule(_OK, "Decode workers shake hands there."),
    "side-channel-unknown": Rule(
        _NOTE, "Whether decode workers can reach it cannot be told.", "run doctor without --no-probe"
    ),
    "side-channel-unreachable": Rule(
        _WARNING,
        "A decode worker that cannot connect there gives up after 5 s. From here is not from there: where doctor runs "
        "in another network, nothing may be wrong.",
        "open VLLM_NIXL_SIDE_CHANNEL_PORT (5600, and one more for each data-parallel rank) to the decode workers",
    ),
    "side-channel-local": Rule(
        _ERROR,
        "Decode workers on other machines will look for it on their own.",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST to the address by which decode workers reach it (a pod's: status.podIP)",
    ),
    "side-channel-foreign": Rule(
        _ERROR,
        "The gateway refuses parameters that point to another host than the worker's, so nothing is handed over.",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST to the host of the worker's URL, or workers[].nixl to what it announces",
    ),
    "side-channel-shared": Rule(
        _ERROR,
        "Two engines cannot listen at one port: decode workers will find the other one, or none.",
        "give each engine of a host a VLLM_NIXL_SIDE_CHANNEL_PORT of its own; each takes one port for each rank",
    ),
    # ---- transfers ----
    "nixl-speed": Rule(_OK, "Transfers are faster than TCP could be."),
    "nixl-slow": Rule(
        _WARNING,
        "NIXL (UCX) takes TCP where it finds nothing better, and says so in its log only; each handoff pays for it.",
        "check UCX_TLS (with rc or dc and cuda_copy, cuda_ipc; not tcp alone) and UCX_NET_DEVICES (mlx5_0:1,...), load "
        "nvidia_peermem, give containers /dev/infiniband and IPC_LOCK; UCX_PROTO_INFO=y shows what was chosen; on one "
        "host without RDMA pulls go over TCP in some NIXL versions",
    ),
    "nixl-unjudged": Rule(
        _NOTE,
        "Too little was transferred to tell RDMA from TCP.",
        "run doctor again when prompts have been handed over",
    ),
    "transfer-blocks": Rule(
        _WARNING,
        "Each block of each layer costs about 4.35 us to post, whatever its size (measured on H200; with MLA, whose "
        "blocks are smaller, unmeasured), and holds up the decode worker's answers meanwhile.",
        "start all workers with the --block-size named",
    ),
    "transfers-failed": Rule(
        _WARNING,
        "Each failed fetch is a prompt computed twice, or a failed request.",
        "see the side-channel and pair findings; read the worker's log",
    ),
    "lease-expired": Rule(
        _NOTE,
        "Clients that leave and refused requests do that; many of them mean that decode workers come too late.",
        "compare with warmroute_pd_leases_expired_total and warmroute_pd_stranded_tokens",
    ),
    "lease-outlived": Rule(
        _ERROR,
        "Blocks read after their lease may have been another prompt's by then: wrong text with status 200, which stays "
        "in the decode worker's cache.",
        "set --pd-lease-s to the worker's kv_lease_duration or less, let only one gateway hand over, and reset the "
        "decode workers' caches",
    ),
    "clock-skew-lease": Rule(
        _WARNING,
        "Leases are counted by the Date of the worker's answers. When such a clock is put right, its answers look late "
        "for ten minutes, and prompts are computed where they are answered.",
        "synchronise the clocks (NTP, chrony)",
    ),
}
