"""How fast KV moves, and whether blocks are large enough for it.

A transfer takes `base + max(bytes / bandwidth, 4.35 us * descriptors)`, a descriptor being one block of one layer
(measured with NIXL 1.5 between two H200). What is left of its time without base and descriptors is the wire's. RDMA
moves 10 to 40 GB/s through one adapter, NVLink hundreds; UCX over TCP, to which NIXL falls back without a word, was
seen at 0.1 to 0.5 GB/s and does not pass the 1 to 2 GB/s of one stream.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.doctor.catalogue import finding
from gateway.doctor.findings import Finding
from gateway.doctor.identity import Identity, KvShape
from gateway.engine.transfers import NixlCounts

TCP_BYTES_PER_S = 2e9
BASE_S = 5e-3
"""Of one transfer over RDMA, at most (2 ms over NVLink)."""
DESCRIPTOR_S = 4.35e-6
MIN_BYTES = 64 << 20
MIN_DESCRIPTORS = 1000
_ADAPTER_GBPS = 400.0
_HALF = 0.5
_USUAL_PROMPT_TOKENS = 8192
_WORTH_S = 5e-3
"""What posting one transfer takes at least for its descriptors to matter."""
_NO_TIME_S = 1e-9


def judge_transfers(me: Identity) -> list[Finding]:
    """Findings about what `me` fetched, and what others did not fetch from it."""
    counts = me.nixl
    if counts is None:
        return []
    found = _failures(me.url, counts)
    if not me.role.decodes and not counts.transfers:
        return found
    slow = _speed(me.url, counts)
    found.append(slow)
    if slow.code != "nixl-slow":
        found += _blocks(me, counts)
    return found


def _failures(url: str, counts: NixlCounts) -> list[Finding]:
    found = []
    if counts.failed:
        said = f"{counts.failed} transfers failed beside {counts.transfers} that did not"
        shown = {"failed": counts.failed, "transfers": counts.transfers}
        found.append(finding("transfers-failed", url, said, evidence=shown))
    if counts.late:
        said = f"{counts.late} times its blocks were read when their lease was over"
        found.append(finding("lease-outlived", url, said, evidence={"late": counts.late}))
    if counts.expired:
        said = f"{counts.expired} prompts that it computed for others were not fetched in time"
        found.append(finding("lease-expired", url, said, evidence={"expired": counts.expired}))
    return found


def _speed(url: str, counts: NixlCounts) -> Finding:
    fixed_s = BASE_S * counts.transfers + DESCRIPTOR_S * counts.descriptors
    enough = counts.n_bytes >= MIN_BYTES and counts.n_bytes / TCP_BYTES_PER_S >= fixed_s
    if not counts.transfers or not counts.seconds or not enough:
        said = f"{counts.transfers} transfers of {_size(counts.n_bytes)} in all tell nothing of the way they take"
        shown: dict[str, Any] = {"transfers": counts.transfers, "bytes": counts.n_bytes}
        return finding("nixl-unjudged", url, said, evidence=shown)
    wire_s = max(counts.seconds - fixed_s, _NO_TIME_S)
    mb_per_s = counts.n_bytes / max(counts.seconds, _NO_TIME_S) / 1e6
    each_ms = counts.seconds / counts.transfers * 1e3
    shown = {
        "mb_per_s": round(mb_per_s, 1),
        "transfers": counts.transfers,
        "bytes": counts.n_bytes,
        "ms_per_transfer": round(each_ms, 2),
    }
    said = f"{_size(counts.n_bytes)} in {counts.transfers} transfers at {mb_per_s:,.0f} MB/s, {each_ms:.1f} ms each"
    if counts.descriptors:
        each_us = counts.seconds / counts.descriptors * 1e6
        shown["us_per_descriptor"] = round(each_us, 2)
        shown["bytes_per_descriptor"] = int(counts.n_bytes / counts.descriptors)
        said += f", {each_us:.1f} us for each descriptor"
    if counts.n_bytes / wire_s >= TCP_BYTES_PER_S:
        return finding("nixl-speed", url, said, evidence=shown)
    said += "; RDMA makes 10,000 MB/s and more, NVLink more than that"
    return finding("nixl-slow", url, said, evidence=shown)


def _blocks(me: Identity, counts: NixlCounts) -> list[Finding]:
    size = None if me.stats is None else me.stats.block_size
    if size is None:
        return []
    if counts.descriptors >= MIN_DESCRIPTORS and counts.n_bytes >= MIN_BYTES:
        per_descriptor, how = counts.n_bytes / counts.descriptors, "as counted, neighbouring blocks merged"
        descriptors = counts.descriptors / max(1, counts.transfers)
    elif me.kv_shape is not None:
        per_descriptor, how = me.kv_shape.layer_bytes_per_token * size, "by the model's config.json"
        descriptors = me.kv_shape.layers * _USUAL_PROMPT_TOKENS / size
    else:
        return []
    return block_sizes(me.url, size, per_descriptor, how) if descriptors * DESCRIPTOR_S >= _WORTH_S else []


def block_sizes(url: str, block_size: int, descriptor_bytes: float, how: str) -> list[Finding]:
    """Whether descriptors of `descriptor_bytes` reach half of an adapter of 400 Gb/s; `how` they are known."""
    from bench.advise.network import best, link
    from bench.advise.network import block_sizes as by_size

    way = link(_ADAPTER_GBPS)
    share = descriptor_bytes / way.bytes_per_s / way.per_descriptor_s
    if share >= _HALF:
        return []
    wanted = best(by_size(descriptor_bytes / block_size, 1, block_size, 1, way)).tokens
    if wanted <= block_size:
        return []
    reached = descriptor_bytes / way.per_descriptor_s
    said = (
        f"with blocks of {block_size} tokens a descriptor is {_size(descriptor_bytes)} ({how}), so transfers end at "
        f"{reached / 1e9:.1f} GB/s however fast the network is; {wanted} suit an adapter of {_ADAPTER_GBPS:.0f} Gb/s"
    )
    shown = {
        "block_size": block_size,
        "bytes_per_descriptor": int(descriptor_bytes),
        "most_mb_per_s": round(reached / 1e6),
        "recommended_block_size": wanted,
    }
    return [finding("transfer-blocks", url, said, evidence=shown)]


def kv_shape(me: Identity) -> KvShape | None:
    """By the config.json of a model that is a directory here. None with MLA, whose descriptors nobody has measured."""
    from bench.advise.errors import InputError
    from bench.advise.model_config import KV_DTYPES, read_model

    root = None if me.models is None else me.models.root
    if root is None or not Path(root).is_absolute() or not Path(root, "config.json").is_file():
        return None
    try:
        model = read_model(Path(root))
    except (InputError, OSError):
        return None
    value_bytes = KV_DTYPES.get(me.kv_cache_dtype or "auto")
    if value_bytes is None or model.latent_values:
        return None
    ranks = 1 if me.settings is None else me.settings.tensor_parallel or 1
    layers = model.layers.full + model.layers.windowed
    return KvShape(layers, model.kv_values_per_layer * value_bytes * model.copies(ranks) / ranks)


def _size(n_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"
