from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GPU: _ClassVar[Tier]
    CPU: _ClassVar[Tier]
    DISK: _ClassVar[Tier]
    OTHER: _ClassVar[Tier]

class Knowledge(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNHEARD: _ClassVar[Knowledge]
    KNOWN: _ClassVar[Knowledge]
    GAP: _ClassVar[Knowledge]
    STALE: _ClassVar[Knowledge]
GPU: Tier
CPU: Tier
DISK: Tier
OTHER: Tier
UNHEARD: Knowledge
KNOWN: Knowledge
GAP: Knowledge
STALE: Knowledge

class MatchRequest(_message.Message):
    __slots__ = ("model", "lora", "cache_salt", "token_ids", "block_keys", "block_size", "media")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    model: str
    lora: str
    cache_salt: str
    token_ids: bytes
    block_keys: bytes
    block_size: int
    media: _containers.RepeatedCompositeFieldContainer[Media]
    def __init__(self, model: _Optional[str] = ..., lora: _Optional[str] = ..., cache_salt: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., block_keys: _Optional[bytes] = ..., block_size: _Optional[int] = ..., media: _Optional[_Iterable[_Union[Media, _Mapping]]] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("id", "start_token", "n_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    start_token: int
    n_tokens: int
    def __init__(self, id: _Optional[str] = ..., start_token: _Optional[int] = ..., n_tokens: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("instance", "sequence", "holdings")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    sequence: int
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    def __init__(self, instance: _Optional[str] = ..., sequence: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("worker", "rank", "gpu_tokens", "cpu_tokens", "disk_tokens", "reach_tokens", "knowledge", "epoch", "resident_blocks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REACH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    gpu_tokens: int
    cpu_tokens: int
    disk_tokens: int
    reach_tokens: int
    knowledge: Knowledge
    epoch: int
    resident_blocks: int
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., gpu_tokens: _Optional[int] = ..., cpu_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., reach_tokens: _Optional[int] = ..., knowledge: _Optional[_Union[Knowledge, str]] = ..., epoch: _Optional[int] = ..., resident_blocks: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("instance", "sequence")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    sequence: int
    def __init__(self, instance: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Update(_message.Message):
    __slots__ = ("begin", "sections", "deltas", "end", "sequence")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    sections: _containers.RepeatedCompositeFieldContainer[Section]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    end: End
    sequence: int
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., sections: _Optional[_Iterable[_Union[Section, _Mapping]]] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., sequence: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("instance", "resumed", "sequence", "version")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    instance: str
    resumed: bool
    sequence: int
    version: str
    def __init__(self, instance: _Optional[str] = ..., resumed: bool = ..., sequence: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Section(_message.Message):
    __slots__ = ("worker", "rank", "first", "last", "blocks", "feed", "adapters")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    first: bool
    last: bool
    blocks: _containers.RepeatedCompositeFieldContainer[Blocks]
    feed: Feed
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., first: bool = ..., last: bool = ..., blocks: _Optional[_Iterable[_Union[Blocks, _Mapping]]] = ..., feed: _Optional[_Union[Feed, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("sequence", "changes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, sequence: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("worker", "rank", "gone", "cleared", "tier", "removed", "stored", "digest", "adapter", "feed")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    gone: bool
    cleared: bool
    tier: Tier
    removed: bytes
    stored: Blocks
    digest: Digest
    adapter: str
    feed: Feed
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., gone: bool = ..., cleared: bool = ..., tier: _Optional[_Union[Tier, str]] = ..., removed: _Optional[bytes] = ..., stored: _Optional[_Union[Blocks, _Mapping]] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ..., adapter: _Optional[str] = ..., feed: _Optional[_Union[Feed, _Mapping]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("tier", "block_size", "keys", "runs", "parents")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    block_size: int
    keys: bytes
    runs: _containers.RepeatedScalarFieldContainer[int]
    parents: bytes
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., block_size: _Optional[int] = ..., keys: _Optional[bytes] = ..., runs: _Optional[_Iterable[int]] = ..., parents: _Optional[bytes] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("blocks", "keys_sum")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEYS_SUM_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    keys_sum: int
    def __init__(self, blocks: _Optional[int] = ..., keys_sum: _Optional[int] = ...) -> None: ...

class Feed(_message.Message):
    __slots__ = ("endpoint", "endpoint_state", "replay_endpoint", "phase", "partial", "epoch", "gaps", "missing_batches", "batches", "events")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_STATE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BATCHES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    endpoint_state: str
    replay_endpoint: str
    phase: str
    partial: bool
    epoch: int
    gaps: int
    missing_batches: int
    batches: int
    events: int
    def __init__(self, endpoint: _Optional[str] = ..., endpoint_state: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., phase: _Optional[str] = ..., partial: bool = ..., epoch: _Optional[int] = ..., gaps: _Optional[int] = ..., missing_batches: _Optional[int] = ..., batches: _Optional[int] = ..., events: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("instance", "sequence", "version", "index_bytes", "entries", "watchers", "holders", "ready")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    instance: str
    sequence: int
    version: str
    index_bytes: int
    entries: int
    watchers: int
    holders: _containers.RepeatedCompositeFieldContainer[HolderStats]
    ready: bool
    def __init__(self, instance: _Optional[str] = ..., sequence: _Optional[int] = ..., version: _Optional[str] = ..., index_bytes: _Optional[int] = ..., entries: _Optional[int] = ..., watchers: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[HolderStats, _Mapping]]] = ..., ready: bool = ...) -> None: ...

class HolderStats(_message.Message):
    __slots__ = ("worker", "rank", "knowledge", "feed", "gpu_tokens", "cpu_tokens", "disk_tokens", "resident_blocks", "digest")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    GPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker: str
    rank: int
    knowledge: Knowledge
    feed: Feed
    gpu_tokens: int
    cpu_tokens: int
    disk_tokens: int
    resident_blocks: int
    digest: Digest
    def __init__(self, worker: _Optional[str] = ..., rank: _Optional[int] = ..., knowledge: _Optional[_Union[Knowledge, str]] = ..., feed: _Optional[_Union[Feed, _Mapping]] = ..., gpu_tokens: _Optional[int] = ..., cpu_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., resident_blocks: _Optional[int] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
