"""Every configuration key: type, default, bounds, unit and meaning, declared once.

The YAML, environment and flag readers, `--print-default` and the help texts are all derived from these structs. A key's
unit is the end of its name (`_s`, `_ms`, `_bytes`); a `description` says what it does and, where a figure is not
obvious, where it comes from. `extra={"expected": ...}` words a pattern for error messages; `extra=LIVE` marks a key
that a running process takes from a configuration read again (gateway/reload.py), without a restart.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

LIVE = {"live": True}
LogLevel = Literal["debug", "info", "warning", "error"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]
_PORT = r"(?:0|[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]\x00-\x20]+)"
Url = Annotated[
    str,
    Meta(
        pattern=rf"^https?://{_HOST}(?::{_PORT})?(/[^\s?#@\x00-\x20]*)?$",
        extra={"expected": "an http:// or https:// URL without user, query or fragment"},
    ),
]
Endpoint = Annotated[
    str,
    Meta(
        pattern=rf"^(tcp://\S+:{_PORT}|ipc://\S+)$",
        extra={"expected": "a ZeroMQ endpoint (tcp://host:port or ipc://path)"},
    ),
]
EndpointTemplate = Annotated[
    str,
    Meta(
        pattern=rf"^tcp://[^\s/]+:(?:{_PORT}|\{{port\}})$",
        extra={"expected": "a ZeroMQ endpoint with {ip} for the pod's address (tcp://{ip}:port)"},
    ),
]
KubernetesName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?$",
        extra={"expected": "the name of an object of Kubernetes"},
    ),
]
Address = Annotated[
    str,
    Meta(pattern=rf"^{_HOST}(?::{_PORT})?$", extra={"expected": "host or host:port ([address]:port for IPv6)"}),
]
RpcAddress = Annotated[
    str,
    Meta(
        pattern=rf"^(unix:/\S+|{_HOST}:{_PORT})$",
        extra={"expected": "host:port ([address]:port for IPv6) or unix:/PATH"},
    ),
]
HeaderName = Annotated[
    str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$", extra={"expected": "the name of an HTTP header"})
]
RedisUrl = Annotated[
    str,
    Meta(
        pattern=rf"^(rediss?://{_HOST}(?::{_PORT})?(,{_HOST}(?::{_PORT})?)*(/\d{{1,5}})?|unix://(/[^\s?#@\x00-\x20]+))$",
        extra={
            "expected": "redis://host:port/db, rediss://... (TLS) or unix:///path, several hosts with commas between; "
            "user and password go to redis.user and redis.password_env"
        },
    ),
]
KeyPart = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_.-]{1,128}$",
        extra={"expected": "a text of 1 to 128 letters, digits, dots, dashes and underscores"},
    ),
]
WorkerName = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f]+\Z",
        max_length=253,
        extra={"expected": "a text of at most 253 characters, without control characters"},
    ),
]
NonEmpty = Annotated[str, Meta(min_length=1, extra={"expected": "a non-empty text"})]


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class GatewayConfig(_Section, frozen=True):
    """The HTTP face."""

    host: Annotated[NonEmpty, Meta(description="Address the data plane listens on.")] = "0.0.0.0"  # noqa: S104
    port: Annotated[Port, Meta(description="Port of the data plane; 0 takes a free one.")] = 8000
    admin_host: Annotated[
        NonEmpty, Meta(description="Address of /metrics and /debug; loopback unless you decide otherwise.")
    ] = "127.0.0.1"
    admin_port: Annotated[Port, Meta(description="Port of /metrics and /debug; 0 takes a free one.")] = 8001
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Data planes, each with a core to use, that are one gateway on this machine; above 1 a "
            "supervisor and a hub come with them.",
        ),
    ] = 1
    max_body_bytes: Annotated[
        int, Meta(ge=1, description="Largest request body accepted; a larger one is answered 413.")
    ] = 64 << 20
    min_body_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            description="A request body that comes more slowly, on average and after 10 s, is given up (408); 0: "
            "none is.",
        ),
    ] = 1024
    max_concurrency: Annotated[
        int,
        Meta(ge=1, description="Requests in flight at once; one more is answered 503 with Retry-After.", extra=LIVE),
    ] = 4096
    connect_timeout_s: Annotated[Seconds, Meta(description="Longest wait for a connection to a worker.")] = 2.0
    pool_idle_s: Annotated[
        Seconds,
        Meta(description="Close a pooled worker connection idle this long; keep it below the server's (uvicorn: 5 s)."),
    ] = 4.0
    request_timeout_s: Annotated[Seconds, Meta(description="Longest life of one request, streaming included.")] = 3600.0
    drain_timeout_s: Annotated[
        Annotated[float, Meta(ge=0)],
        Meta(description="On SIGTERM, time given to running requests before closing.", extra=LIVE),
    ] = 30.0
    stored_responses: Annotated[
        int,
        Meta(
            ge=0,
            description="Ids of /v1/responses remembered with the worker that holds them; for others "
            "every worker is asked.",
        ),
    ] = 65_536
    unknown_models: Annotated[
        Literal["refuse", "try"],
        Meta(
            description="A model that no worker lists: refuse it (404), or try it as an adapter of the only base "
            "model, which a worker may load when asked (vLLM's LoRA resolvers)."
        ),
    ] = "refuse"
    http: Annotated[
        Literal["fast", "aiohttp"],
        Meta(
            description="What speaks HTTP to clients and workers for inference: our own reader, or aiohttp throughout."
        ),
    ] = "fast"
    response_headers: Annotated[
        bool, Meta(description="Name the chosen worker and the reason in x-warmroute-* response headers.")
    ] = True


class Worker(_Section, frozen=True):
    """One engine server. A bare URL in the list is short for `{url: ...}`."""

    url: Annotated[Url, Meta(description="Base URL of the server.")]
    name: Annotated[
        WorkerName | None, Meta(description="Name in metrics and headers; null takes host:port of the URL.")
    ] = None
    role: Annotated[Literal["both", "prefill", "decode"], Meta(description="What the worker may be asked to do.")] = (
        "both"
    )
    events: Annotated[
        Endpoint | None, Meta(description="KV-event publisher; null asks the engine where it publishes.")
    ] = None
    replay: Annotated[Endpoint | None, Meta(description="KV-event replay endpoint; null asks the engine for it.")] = (
        None
    )
    nixl: Annotated[
        Address | None,
        Meta(description="Where its NIXL side channel is, if not on the host of its URL; without a port, any port."),
    ] = None
    server_name: Annotated[
        NonEmpty | None,
        Meta(description="With https, the name to ask for and check its certificate by; null: the host of the URL."),
    ] = None
    weight: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description="Speed of its hardware relative to the others'; predicted seconds are divided by it.",
        ),
    ] = 1.0
    labels: Annotated[dict[str, str], Meta(description="Free labels, shown in debug pages.")] = {}


class DiscoveryConfig(_Section, frozen=True):
    """Workers that are not named one by one."""

    dns: Annotated[
        tuple[Worker, ...],
        Meta(
            description="Each address of the host of these URLs is a worker, with the other keys (no name; the host * "
            "of events or replay is that address)."
        ),
    ] = ()
    interval_s: Annotated[float, Meta(ge=1, description="Period of resolving these names anew.")] = 5.0
    link_local: Annotated[
        bool,
        Meta(
            description="Take workers at link-local addresses too; else neither these nor others where clouds keep "
            "metadata are connected to, whoever names them."
        ),
    ] = False


class KubernetesConfig(_Section, frozen=True):
    """Pods as workers, followed through the Kubernetes API: those of an InferencePool, or those of a selector."""

    pool: Annotated[
        KubernetesName | None,
        Meta(description="Name of the InferencePool (v1) whose pods and target ports are the workers; null: none."),
    ] = None
    namespace: Annotated[
        KubernetesName | None,
        Meta(description="Namespace of pool and pods; null: that of the service account, or of the kubeconfig."),
    ] = None
    selector: Annotated[
        NonEmpty | None,
        Meta(description="Label selector of the pods, such as app=vllm, where there is no pool; null: none."),
    ] = None
    ports: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65535)], ...],
        Meta(description="Ports of each selected pod that are a server; of several, each is a data-parallel rank."),
    ] = (8000,)
    scheme: Annotated[Literal["http", "https"], Meta(description="What the pods speak.")] = "http"
    events: Annotated[
        EndpointTemplate | None,
        Meta(
            description="KV-event publisher of a pod, such as tcp://{ip}:5557 ({port}, {pod} and {namespace} are its "
            "own too); further ranks follow on the ports after it. null asks the engine."
        ),
    ] = None
    replay: Annotated[
        EndpointTemplate | None, Meta(description="KV-event replay endpoint of a pod, likewise; null asks the engine.")
    ] = None
    kubeconfig: Annotated[
        NonEmpty | None, Meta(description="File to reach the API by from outside; null: the pod's service account.")
    ] = None
    leader_election: Annotated[
        bool,
        Meta(description="Of several replicas of warmroute epp, let one at a time serve: the holder of a Lease."),
    ] = False


class SidecarConfig(_Section, frozen=True):
    """The face in a decode pod (`warmroute sidecar`). Limits and times are those of the section gateway."""

    engine: Annotated[Url, Meta(description="Base URL of the engine in this pod, rank 0 where there are several.")] = (
        "http://127.0.0.1:8200"
    )
    host: Annotated[NonEmpty, Meta(description="Address the sidecar listens on.")] = "0.0.0.0"  # noqa: S104
    port: Annotated[Port, Meta(description="Port of rank 0; rank r has the r-th after it. 0 takes free ones.")] = 8000
    admin_host: Annotated[
        NonEmpty, Meta(description="Address of the sidecar's own /metrics and /debug; loopback unless you say so.")
    ] = "127.0.0.1"
    admin_port: Annotated[
        Port, Meta(description="Port of the sidecar's own /metrics and /debug; 0 takes a free one.")
    ] = 8090
    data_parallel_size: Annotated[
        int,
        Meta(ge=1, le=256, description="Engines in this pod, one for each rank, on sidecar.engine's port and after."),
    ] = 1
    prefiller_sampling: Annotated[
        bool, Meta(description="Of several prefill hints try a random one first, not the first.")
    ] = False


class EppConfig(_Section, frozen=True):
    """The endpoint picker behind Envoy (`warmroute epp`). Limits and times are those of the section gateway."""

    host: Annotated[NonEmpty, Meta(description="Address of ext_proc, of gRPC health and of /metrics.")] = "0.0.0.0"  # noqa: S104
    port: Annotated[Port, Meta(description="Port of ext_proc, which answers gRPC health too; 0 takes a free one.")] = (
        9002
    )
    health_port: Annotated[Port, Meta(description="Port of gRPC health by itself; 0 takes a free one.")] = 9003
    metrics_port: Annotated[
        Port, Meta(description="Port of /metrics, /readyz, /livez and /health; 0 takes a free one.")
    ] = 9090
    admin_host: Annotated[
        NonEmpty, Meta(description="Address of the picker's own /debug; loopback unless you decide otherwise.")
    ] = "127.0.0.1"
    admin_port: Annotated[Port, Meta(description="Port of the picker's own /debug; 0 takes a free one.")] = 9091
    tls: Annotated[
        Literal["self_signed", "files", "off"],
        Meta(
            description="ext_proc in TLS: with a certificate made at the start, which gateways expect and do not "
            "check, with tls.cert and tls.key, or not at all."
        ),
    ] = "self_signed"
    sidecar: Annotated[
        Literal["warmroute", "llm-d", "none"],
        Meta(
            description="What stands before the engines and carries plans out. llm-d: prefill workers only, no peers; "
            "none: each prompt is computed where it is decoded."
        ),
    ] = "warmroute"
    responses: Annotated[
        Literal["seen", "unseen"],
        Meta(
            description="unseen: the proxy shows no responses (response_header_mode: SKIP), which is cheaper; nothing "
            "is learned then, and bookings are given back by estimate."
        ),
    ] = "seen"
    grpc: Annotated[
        Literal["fast", "grpcio"],
        Meta(description="What speaks gRPC with proxies: our own reader, or grpcio, which takes a few times as long."),
    ] = "fast"
    decision_deadline_s: Annotated[
        Seconds, Meta(description="Longest time to decide, waiting for room apart; 503 beyond it.")
    ] = 5.0
    fallback_endpoints: Annotated[
        int,
        Meta(
            ge=0,
            description="Next best endpoints named after the choice, for data planes that take a list (Istio); others "
            "fail on one.",
        ),
    ] = 0
    emit_scores: Annotated[
        bool,
        Meta(
            description="Tell the proxy, in dynamic metadata, what the best endpoints are worth: 1 / (1 + predicted "
            "seconds)."
        ),
    ] = False
    objectives: Annotated[
        tuple[NonEmpty, ...],
        Meta(
            description="Names of x-llm-d-inference-objective with their priorities: NAME=PRIORITY, larger first.",
            extra=LIVE,
        ),
    ] = ()
    rewrites: Annotated[
        tuple[NonEmpty, ...],
        Meta(description="Models asked for in place of others: MODEL=TARGET or MODEL=TARGET*WEIGHT.", extra=LIVE),
    ] = ()
    conformance: Annotated[
        bool,
        Meta(
            description="For the conformance suite of GAIE only: the header test-epp-endpoint-selection picks, the "
            "response names the endpoint that served, and load alone decides otherwise."
        ),
    ] = False


class IndexerConfig(_Section, frozen=True):
    """The index as a service (`warmroute indexer`). TLS is that of the section tls."""

    host: Annotated[NonEmpty, Meta(description="Address of gRPC and of /metrics.")] = "0.0.0.0"  # noqa: S104
    port: Annotated[Port | None, Meta(description="Port of gRPC; 0 takes a free one, null: only the socket.")] = 9010
    socket: Annotated[
        NonEmpty | None, Meta(description="Path of a Unix socket that speaks gRPC too, without TLS; null: none.")
    ] = None
    client_ca: Annotated[
        NonEmpty | None,
        Meta(description="PEM file with the CAs of clients; with it only those with a certificate are served."),
    ] = None
    token_env: Annotated[
        NonEmpty,
        Meta(description="Name of the environment variable with the token that clients must show; not on the socket."),
    ] = "WARMROUTE_INDEXER_TOKEN"  # noqa: S105 - its name
    token_file: Annotated[
        NonEmpty | None, Meta(description="File with that token, instead of the environment; null: none.")
    ] = None
    metrics_port: Annotated[
        Port, Meta(description="Port of /metrics, /readyz, /livez and /health; 0 takes a free one.")
    ] = 9011
    admin_host: Annotated[
        NonEmpty, Meta(description="Address of the indexer's own /debug; loopback unless you decide otherwise.")
    ] = "127.0.0.1"
    admin_port: Annotated[Port, Meta(description="Port of the indexer's own /debug; 0 takes a free one.")] = 9012
    history_bytes: Annotated[
        int, Meta(ge=1 << 16, description="Latest changes kept for watchers to go on from; slower ones begin anew.")
    ] = 64 << 20
    digest_interval_s: Annotated[
        float, Meta(ge=1, description="Period of summing up each worker's blocks, by which copies check themselves.")
    ] = 30.0
    write_timeout_s: Annotated[Seconds, Meta(description="A watcher that takes no message for so long is cut off.")] = (
        30.0
    )
    warm_up_s: Annotated[
        Seconds, Meta(description="Longest time after the start to catch up with the engines before answering.")
    ] = 30.0


class PdConfig(_Section, frozen=True):
    """Prefill on one worker, decode on another."""

    policy: Annotated[
        NonEmpty | None,
        Meta(
            description="Where a prompt is computed: cost, header, local, always-remote, threshold:N, isl:N,RATIO or "
            "isl-ratio:N,RATIO; null: header in the sidecar, cost in the gateway."
        ),
    ] = None
    peers: Annotated[
        bool,
        Meta(
            description="With policy cost, also ask a worker that decodes for a prompt it holds more of, through NIXL."
        ),
    ] = True
    no_hint: Annotated[
        Literal["decide", "local"],
        Meta(description="In the sidecar, a request without a hint header: pd.policy decides, or it is local."),
    ] = "decide"
    connector: Annotated[Literal["nixl"], Meta(description="How the KV blocks travel (vLLM's KV connector).")] = "nixl"
    lease_s: Annotated[
        Seconds, Meta(description="How long a prefill worker keeps blocks nobody fetched (vLLM: kv_lease_duration).")
    ] = 30.0
    lease_margin_s: Annotated[
        Seconds, Meta(description="So long before the end of a lease its blocks are no longer used.")
    ] = 5.0
    prefill_timeout_s: Annotated[Seconds, Meta(description="Longest wait for a prefill worker's answer.")] = 120.0
    on_prefill_failure: Annotated[
        Literal["next,local", "local", "next,fail", "fail"],
        Meta(description="After a failed prefill: try the next prefill worker, compute locally, or fail the request."),
    ] = "next,local"
    allow: Annotated[
        tuple[NonEmpty, ...],
        Meta(
            description="Prefill targets that hint headers may name: host:port, host:*, CIDR:port, CIDR:*, "
            "[IPv6 or CIDR]:port, or * for any. Known workers of role prefill are always allowed."
        ),
    ] = ()


class TlsConfig(_Section, frozen=True):
    """TLS on both sides of a face. Workers with an https URL are spoken to in TLS, whatever these say."""

    cert: Annotated[
        NonEmpty | None, Meta(description="PEM file with the certificate to serve with; null serves plain HTTP.")
    ] = None
    key: Annotated[NonEmpty | None, Meta(description="PEM file with the key of tls.cert.")] = None
    client_ca: Annotated[
        NonEmpty | None,
        Meta(
            description="PEM file with the CAs of client certificates that the data plane demands; null: it does not."
        ),
    ] = None
    ca: Annotated[
        NonEmpty | None,
        Meta(description="PEM file with the CAs that engines and workers are checked by; null: the system's."),
    ] = None
    client_cert: Annotated[
        NonEmpty | None, Meta(description="PEM file with the certificate that we show to engines and workers.")
    ] = None
    client_key: Annotated[NonEmpty | None, Meta(description="PEM file with the key of tls.client_cert.")] = None
    insecure_skip_verify: Annotated[bool, Meta(description="Do not check certificates of engines and workers.")] = False


class EventsConfig(_Section, frozen=True):
    """KV events from the engines."""

    mode: Annotated[
        Literal["connect", "bind"],
        Meta(description="connect: we subscribe to each engine; bind: engines connect to bind_endpoint."),
    ] = "connect"
    bind_endpoint: Annotated[
        Endpoint | None, Meta(description="Where to listen in mode bind, such as tcp://0.0.0.0:5557.")
    ] = None
    replay_timeout_s: Annotated[Seconds, Meta(description="Longest wait for one answer to a replay request.")] = 2.0
    replay_attempts: Annotated[
        int, Meta(ge=1, description="Replay requests for one gap before it is given up and the worker marked partial.")
    ] = 3
    buffer_batches: Annotated[
        int, Meta(ge=1, description="Batches held per worker while a gap is replayed (vLLM replays at most 10000).")
    ] = 10_000


class IndexServiceConfig(_Section, frozen=True):
    """Where `warmroute indexer` is, for index.source: service."""

    addresses: Annotated[
        tuple[RpcAddress, ...],
        Meta(description="Indexers, the one to prefer first: host:port, or unix:PATH on this host."),
    ] = ()
    mode: Annotated[
        Literal["replica", "query"],
        Meta(description="replica: keep a copy and decide in this process; query: ask once for each request."),
    ] = "replica"
    budget_ms: Annotated[
        Seconds, Meta(description="Longest wait for an answer, in mode query; past it what is known here decides.")
    ] = 5.0
    tls: Annotated[bool, Meta(description="Speak TLS to host:port.")] = False
    ca: Annotated[
        NonEmpty | None, Meta(description="PEM file with the CAs that indexers are checked by; null: gRPC's own.")
    ] = None
    cert: Annotated[
        NonEmpty | None, Meta(description="PEM file with the certificate to show to indexers that ask for one.")
    ] = None
    key: Annotated[NonEmpty | None, Meta(description="PEM file with the key of index.service.cert.")] = None
    server_name: Annotated[
        NonEmpty | None, Meta(description="Name that indexers' certificates are checked by; null: the host.")
    ] = None
    token_env: Annotated[
        NonEmpty, Meta(description="Name of the environment variable with the token that indexers demand.")
    ] = "WARMROUTE_INDEXER_TOKEN"  # noqa: S105 - its name
    token_file: Annotated[
        NonEmpty | None, Meta(description="File with that token, instead of the environment; null: none.")
    ] = None


class IndexConfig(_Section, frozen=True):
    """The prefix index."""

    source: Annotated[
        Literal["local", "service"],
        Meta(description="local: subscribe to the engines' KV events here; service: let index.service do so."),
    ] = "local"
    service: IndexServiceConfig = IndexServiceConfig()

    budget_bytes: Annotated[
        int, Meta(ge=1 << 20, description="Memory the index may use; the coldest blocks are dropped beyond it.")
    ] = 2 << 30
    orphan_blocks: Annotated[
        int, Meta(ge=0, description="Blocks with an unknown parent kept per worker rank until the parent arrives.")
    ] = 65_536
    removal_mode: Annotated[
        Literal["physical", "logical"],
        Meta(description="physical: one removal event is one copy gone; logical: it is the whole block gone."),
    ] = "physical"


class ScorerConfig(_Section, frozen=True):
    """Which worker a request goes to."""

    policy: Annotated[
        Literal["warmroute", "round-robin", "random", "least-load", "longest-prefix"],
        Meta(description="warmroute predicts seconds; the others are baselines to compare with."),
    ] = "warmroute"
    optimistic_ttl_s: Annotated[
        Seconds, Meta(description="Life of blocks assumed from a decision until a KV event confirms them.")
    ] = 4.0
    slo_ttft_ms: Annotated[
        Seconds | None, Meta(description="Time-to-first-token objective; null leaves it out of the price.", extra=LIVE)
    ] = None
    slo_tpot_ms: Annotated[
        Seconds | None,
        Meta(description="Time-per-output-token objective; null leaves it out of the price.", extra=LIVE),
    ] = None
    session_header: Annotated[HeaderName, Meta(description="Request header that names a session.")] = "x-session-id"
    session_affinity: Annotated[
        Literal["off", "prefer", "strict"],
        Meta(
            description="prefer: where no KV events tell, what a session's history saves is taken off its worker's "
            "price; strict: it stays with its worker while that is up and not too busy."
        ),
    ] = "off"
    session_wait_s: Annotated[
        Seconds, Meta(description="Longest predicted wait for which a strict session stays with its worker.")
    ] = 10.0
    session_idle_s: Annotated[Seconds, Meta(description="A session not heard of for longer is forgotten.")] = 3600.0


class QueueConfig(_Section, frozen=True):
    """Requests of the gateway that wait while every worker that could serve them has enough waiting inside."""

    enabled: Annotated[
        bool, Meta(description="Hold requests while all are saturated; false: engines queue alone.", extra=LIVE)
    ] = True
    waiting_per_worker: Annotated[
        int,
        Meta(ge=1, description="Requests waiting inside an engine (each rank) from which on it has no room."),
    ] = 8
    max_requests: Annotated[
        int, Meta(ge=0, description="Requests of one model that may wait here; one more is answered 429.", extra=LIVE)
    ] = 2048
    max_tokens: Annotated[
        int, Meta(ge=1, description="Prompt tokens of one model that may wait here, a lone request apart.", extra=LIVE)
    ] = 32_000_000
    max_wait_s: Annotated[
        Seconds, Meta(description="Longest wait here, then 429 (600 s is where OpenAI's clients give up).", extra=LIVE)
    ] = 600.0
    tenant_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of max_requests and max_tokens one tenant may take; see tenancy.header.",
            extra=LIVE,
        ),
    ] = 0.5
    shed_late: Annotated[
        Literal["never", "asked", "objective"],
        Meta(
            description="Answer 429 at once to what is predicted to miss its time to first token: asked: requests with "
            "the header x-warmroute-shed: late; objective: all that have an objective.",
            extra=LIVE,
        ),
    ] = "asked"
    evict_after_s: Annotated[
        Seconds | None,
        Meta(
            description="After so long a wait (or half its objective) a request may take the place of one of lower "
            "priority than the usual that has no answer yet, which is answered 429; null: none is taken back.",
            extra=LIVE,
        ),
    ] = None


class AdminConfig(_Section, frozen=True):
    """Who may use the admin port of a face. On the loopback everybody on the machine may, unless there is a token."""

    token_env: Annotated[
        NonEmpty,
        Meta(description="Name of the environment variable with the token; commands of warmroute send it too."),
    ] = "WARMROUTE_ADMIN_TOKEN"  # noqa: S105 - its name
    token_file: Annotated[
        NonEmpty | None, Meta(description="File with the token, instead of the environment; null: none.")
    ] = None
    client_ca: Annotated[
        NonEmpty | None,
        Meta(
            description="PEM file with the CAs of client certificates that the admin port demands, off the loopback; "
            "needs tls.cert."
        ),
    ] = None
    unprotected: Annotated[
        bool, Meta(description="Serve the admin port off the loopback to everybody who can reach it.")
    ] = False


class AuthConfig(_Section, frozen=True):
    """API keys of the gateway's clients. With either of these each request needs one."""

    keys_file: Annotated[
        NonEmpty | None,
        Meta(
            description="YAML or JSON file of hashed keys with their limits (see warmroute keys), followed while it "
            "serves; null: none."
        ),
    ] = None
    keys_env: Annotated[
        NonEmpty | None,
        Meta(description="Name of the environment variable with TENANT=KEY, ... in plain text, without limits."),
    ] = None


class TenancyConfig(_Section, frozen=True):
    """Whose a request is: by API key, by certificate, or as the authenticating proxy in front of the gateway says."""

    header: Annotated[
        HeaderName | None,
        Meta(description="Header that names the tenant, set by a proxy clients cannot get around; null: all are one."),
    ] = None
    certificate: Annotated[
        bool,
        Meta(description="The tenant is the name in the client's certificate (tls.client_ca), whatever headers say."),
    ] = False
    required: Annotated[bool, Meta(description="Answer 401 to requests of no known tenant.")] = False
    forward_header: Annotated[bool, Meta(description="Let engines see tenancy.header too.")] = False
    salt: Annotated[
        Literal["off", "derive"],
        Meta(
            description="derive: cache_salt is made of the tenant (and its own salt), so that no tenant hits another."
        ),
    ] = "off"
    secret_env: Annotated[
        NonEmpty,
        Meta(description="Name of the environment variable with the secret of derived salts, one for all gateways."),
    ] = "CACHE_SALT_SECRET"  # noqa: S105 - its name


class LearningConfig(_Section, frozen=True):
    """Factors on predicted seconds, learned from what is seen."""

    file: Annotated[
        NonEmpty | None,
        Meta(
            description="File that keeps them over a restart, of this process alone, in a folder that is there; null: "
            "learned.json in the folder systemd gives (StateDirectory=), else they are lost."
        ),
    ] = None


class RedisConfig(_Section, frozen=True):
    """Redis or Valkey, through which replicas of a gateway or picker tell each other what they have in flight."""

    url: Annotated[
        RedisUrl | None,
        Meta(
            description="redis://host:port/db, rediss://... (TLS) or unix:///path; null: every replica is on its own."
        ),
    ] = None
    mode: Annotated[
        Literal["single", "sentinel", "cluster"],
        Meta(description="What the hosts of redis.url are: one server, sentinels, or nodes of a cluster."),
    ] = "single"
    sentinel_master: Annotated[NonEmpty, Meta(description="With sentinels, the name of the master.")] = "mymaster"
    user: Annotated[NonEmpty | None, Meta(description="User of Redis's ACL; null: the default user.")] = None
    password_env: Annotated[
        NonEmpty, Meta(description="Name of the environment variable that holds the password, if there is one.")
    ] = "REDIS_PASSWORD"  # noqa: S105 - its name
    password_file: Annotated[
        NonEmpty | None, Meta(description="File that holds the password, read at each connection; null: none.")
    ] = None
    ca: Annotated[
        NonEmpty | None, Meta(description="PEM file with the CAs that rediss:// is checked by; null: the system's.")
    ] = None
    prefix: Annotated[KeyPart, Meta(description="First part of every key.")] = "warmroute"
    fleet: Annotated[
        KeyPart, Meta(description="Replicas with the same fleet, which know the same workers by the same names, share.")
    ] = "default"
    interval_ms: Annotated[
        float, Meta(ge=1, le=1000, description="Changes are told at once, and then no more often than this.")
    ] = 20.0
    ttl_s: Annotated[
        float,
        Meta(ge=1, le=60, description="A replica not heard of for longer has nothing in flight for the others."),
    ] = 3.0
    connect_timeout_s: Annotated[Seconds, Meta(description="Longest wait for a connection to Redis.")] = 1.0
    op_timeout_ms: Annotated[
        Seconds, Meta(description="Longest wait for an answer of Redis; no request ever waits for one.")
    ] = 250.0


class TokensConfig(_Section, frozen=True):
    """Text to token ids."""

    mode: Annotated[
        Literal["auto", "local", "engine", "estimate"],
        Meta(description="auto: local tokenizer if there is one, else the engine's; estimate: length only, no prefix."),
    ] = "auto"
    tokenizer: Annotated[
        NonEmpty | None, Meta(description="Folder or tokenizer.json for local tokenising; null: none given.")
    ] = None
    engine_budget_ms: Annotated[
        Seconds, Meta(description="Longest wait for an engine's tokenizer; past it the length is estimated.")
    ] = 20.0
    sample_check_rate: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of requests whose local token ids are compared with the engine's."),
    ] = 0.01


class HealthConfig(_Section, frozen=True):
    """Which workers may be chosen."""

    eject_after_s: Annotated[
        Seconds,
        Meta(
            description="Silence with work in hand, while others answer, that ejects a worker; the fault window too.",
            extra=LIVE,
        ),
    ] = 3.0
    scrape_interval_s: Annotated[Seconds, Meta(description="Period of reading each worker's /metrics.")] = 1.0


class LoggingConfig(_Section, frozen=True):
    """Logs on standard error; never prompts or secrets."""

    level: Annotated[LogLevel, Meta(description="Least severe level logged.", extra=LIVE)] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="One line of text or one JSON object per record.")] = (
        "text"
    )


class TracingConfig(_Section, frozen=True):
    """OpenTelemetry spans, sent by OTLP over HTTP; the rest is said by the variables OTEL_*. Needs the extra otel."""

    enabled: Annotated[bool, Meta(description="A span for each request and each of its stages.")] = False
    sample_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="Share of the traces begun here that is kept; others are kept as their traceparent says. null: "
            "as OTEL_TRACES_SAMPLER says, else all.",
        ),
    ] = None


class Config(_Section, frozen=True):
    """The whole configuration. A face with keys of its own has a section here."""

    gateway: GatewayConfig = GatewayConfig()
    sidecar: SidecarConfig = SidecarConfig()
    epp: EppConfig = EppConfig()
    indexer: IndexerConfig = IndexerConfig()
    workers: Annotated[
        tuple[Worker, ...],
        Meta(description="Engine servers known from the start: URLs, or objects with these keys.", extra=LIVE),
    ] = ()
    workers_file: Annotated[
        NonEmpty | None, Meta(description="YAML file holding such a list, re-read when it changes; null: none.")
    ] = None
    discovery: DiscoveryConfig = DiscoveryConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    engine_api_key_env: Annotated[
        str,
        Meta(
            description="Name of the environment variable that holds the engines' --api-key, for our own requests to "
            "them (models, metrics, tokenize); clients send theirs themselves. Empty: no key."
        ),
    ] = "VLLM_API_KEY"
    events: EventsConfig = EventsConfig()
    index: IndexConfig = IndexConfig()
    scorer: ScorerConfig = ScorerConfig()
    queue: QueueConfig = QueueConfig()
    auth: AuthConfig = AuthConfig()
    admin: AdminConfig = AdminConfig()
    tenancy: TenancyConfig = TenancyConfig()
    learning: LearningConfig = LearningConfig()
    redis: RedisConfig = RedisConfig()
    pd: PdConfig = PdConfig()
    tokens: TokensConfig = TokensConfig()
    health: HealthConfig = HealthConfig()
    tls: TlsConfig = TlsConfig()
    logging: LoggingConfig = LoggingConfig()
    tracing: TracingConfig = TracingConfig()
