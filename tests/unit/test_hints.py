"""Control headers -> `Hints`."""

import random
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from gateway.proxy.aio_incoming import AioIncoming
from gateway.proxy.errors import ApiError
from gateway.proxy.incoming import Sender
from gateway.sidecar.hints import NO_HINTS, HintReader, Hints, no_hints, read_plan
from gateway.sidecar.pod import Pod
from gateway.sidecar.targets import Targets
from scorer.fleet import Fleet
from scorer.ledger import Booking
from scorer.types import ChangeKind, Role, WorkerChange

HERE = "10.0.0.5"
PREFILLER = "x-prefiller-host-port"
KV_SOURCE = "x-kv-cache-source-host-port"


class World:
    """A pod with `size` engines behind 10.0.0.5:8000 and after."""

    def __init__(
        self, *, size: int = 1, allow: tuple[str, ...] = ("10.1.0.0/16:*", "[fd00::/8]:*", "p-0:8000"), **kwargs: Any
    ):
        self.fleet = Fleet()
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        self.targets = Targets(self.fleet, self.apply, allow, most=kwargs.pop("most", 256), clock=lambda: self.now_s)
        self.pod: Pod | None = Pod("http://127.0.0.1:8200", size, lambda: [8000 + rank for rank in range(size)])
        if kwargs.pop("no_pod", False):
            self.pod = None
        self.reader = HintReader(
            self.targets, self.registry, kwargs.pop("rng", random.Random(1)), pod=self.pod, **kwargs
        )

    def apply(self, change: WorkerChange) -> None:
        self.fleet.apply(change)

    def read(self, *headers: tuple[str, str], port: int = 8000) -> Hints:
        return self.reader.read(request(*headers, port=port))

    def prefill(self, *values: str) -> tuple[str, ...]:
        return self.read(*((PREFILLER, value) for value in values)).prefill

    def refused(self, *headers: tuple[str, str], port: int = 8000) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.read(*headers, port=port)
        return caught.value

    def count(self, header: str, outcome: str) -> float:
        return self.registry.get_sample_value("warmroute_hints_total", {"header": header, "outcome": outcome}) or 0.0


def request(*headers: tuple[str, str], port: int = 8000) -> Sender:
    transport = Mock()
    transport.get_extra_info = lambda name, default=None: (HERE, port) if name == "sockname" else default
    return AioIncoming(
        make_mocked_request("POST", "/v1/completions", headers=CIMultiDict(headers), transport=transport)
    )


def test_without_headers_only_the_engine_is_settled() -> None:
    assert World().read() == Hints(decode=frozenset({"127.0.0.1:8200"}))
    assert World(no_pod=True).read() == NO_HINTS == no_hints(request((PREFILLER, "10.1.0.1:1")))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (("10.1.0.1:8000",), ["10.1.0.1:8000"]),
        (("10.1.0.1:8000, 10.1.0.2:8000",), ["10.1.0.1:8000", "10.1.0.2:8000"]),
        (("10.1.0.1:8000", "10.1.0.2:8000"), ["10.1.0.1:8000", "10.1.0.2:8000"]),
        (("10.1.0.1:8000,10.1.0.2:8000", " 10.1.0.3:8000 ,,"), ["10.1.0.1:8000", "10.1.0.2:8000", "10.1.0.3:8000"]),
        (("[fd00::1]:8000",), ["[fd00::1]:8000"]),
        (("[FD00:0::1]:8000, [fd00::1]:8000",), ["[fd00::1]:8000"]),
        (("P-0:8000", "p-0:8000"), ["p-0:8000"]),
        (("",), []),
        ((" , ", ""), []),
    ],
)
def test_prefill_targets_in_their_order_and_once(values: tuple[str, ...], names: list[str]) -> None:
    world = World()
    assert list(world.prefill(*values)) == names
    assert {name: world.fleet.workers[name].role for name in names} == dict.fromkeys(names, Role.PREFILL)
    assert [world.fleet.workers[name].url for name in names] == [f"http://{name}" for name in names]


def test_o5_denied_targets_are_dropped_and_all_denied_is_403() -> None:
    """O5: a hint header from outside made it connect anywhere: same address, other port; two headers; lists."""
    world = World()
    assert world.prefill("169.254.169.254:80, 10.1.0.1:8000") == ("10.1.0.1:8000",)
    for values in (["169.254.169.254:80"], ["p-0:22"], ["evil:8000", "p-0:8001, [::2]:8000"]):
        error = world.refused(*((PREFILLER, value) for value in values))
        assert (error.status, error.code) == (403, "prefill_target_denied")
        assert not any(value in error.message for value in values)
    assert list(world.fleet.workers) == ["10.1.0.1:8000"]
    assert world.count(PREFILLER, "denied") == 6


@pytest.mark.parametrize(
    "value",
    ["10.1.0.1", "10.1.0.1:", "10.1.0.1:0", "10.1.0.1:65536", "10.1.0.1:http", "http://10.1.0.1:8000",
     "user@10.1.0.1:1", "fd00::1:8000", "10.1.0.1:8000/x", "10.257:8000", "a b:1", "ÿ:1"],
)  # fmt: skip
def test_malformed_target_is_400_unless_another_is_good(value: str) -> None:
    world = World()
    error = world.refused((PREFILLER, value))
    assert (error.status, error.param) == (400, PREFILLER)
    assert world.fleet.workers == {}
    assert world.prefill(value, "10.1.0.2:8000") == ("10.1.0.2:8000",)
    assert world.count(PREFILLER, "malformed") == 2


def test_to_look_changes_nothing_and_says_what_a_request_would_do() -> None:
    world = World(most=1)
    world.apply(WorkerChange(kind=ChangeKind.ADDED, worker="p1", url="http://10.9.0.1:8000", role=Role.PREFILL))

    def look(*headers: tuple[str, str]) -> tuple[Hints, list[str]]:
        return world.reader.look(request(*headers))

    hints, notes = look((PREFILLER, "10.9.0.1:8000, 10.1.0.1:8000, evil:1"), (KV_SOURCE, "10.1.0.7:8200"))
    assert (hints.prefill, hints.kv_source) == (("p1",), None)
    assert [note.partition(":")[0] for note in notes] == [PREFILLER, PREFILLER, KV_SOURCE]
    for note, part in zip(notes, ("not known yet", "pd.allow", "not known yet"), strict=True):
        assert part in note
    with pytest.raises(ApiError) as caught:
        look((PREFILLER, "evil:1"))
    assert caught.value.status == 403
    assert list(world.fleet.workers) == ["p1"]
    assert not any(sample.value for family in world.registry.collect() for sample in family.samples)
    assert look()[1] == []


def test_sampling_puts_a_random_target_first_and_keeps_the_others() -> None:
    world = World(sampling=True)
    value = "10.1.0.1:1,10.1.0.2:1,10.1.0.3:1"
    orders = {world.prefill(value) for _ in range(60)}
    assert {order[0] for order in orders} == set(value.split(","))
    assert {tuple(sorted(order)) for order in orders} == {tuple(value.split(","))}
    assert len({World().prefill(value) for _ in range(20)}) == 1


def test_a_known_worker_goes_by_its_own_name_and_needs_no_entry() -> None:
    world = World(allow=())
    world.apply(WorkerChange(kind=ChangeKind.ADDED, worker="p1", url="https://10.9.0.1:8000/base", role=Role.PREFILL))
    assert world.prefill("10.9.0.1:8000") == ("p1",)
    assert list(world.fleet.workers) == ["p1"]
    assert world.refused((PREFILLER, "10.9.0.1:8001")).status == 403
    world.apply(WorkerChange(kind=ChangeKind.ADDED, worker="d1", url="http://10.9.0.2:8000", role=Role.DECODE))
    assert world.refused((PREFILLER, "10.9.0.2:8000")).status == 403


def test_who_is_where_may_change() -> None:
    world = World()
    assert world.prefill("10.1.0.1:1") == ("10.1.0.1:1",)
    named = WorkerChange(kind=ChangeKind.ADDED, worker="p1", url="http://10.1.0.1:1", role=Role.PREFILL)
    world.apply(named)
    world.targets.forget_unused()
    assert world.prefill("10.1.0.1:1") == ("p1",)
    world.apply(msgspec.structs.replace(named, url="http://10.1.0.2:1"))
    assert world.prefill("10.1.0.1:1, 10.1.0.2:1") == ("10.1.0.1:1", "p1")
    world.apply(msgspec.structs.replace(named, kind=ChangeKind.REMOVED))
    assert world.prefill("10.1.0.2:1") == ("10.1.0.2:1",)


def test_hinted_workers_are_bounded_and_one_at_work_stays() -> None:
    world = World(most=2)
    world.prefill("10.1.0.1:1")
    world.prefill("10.1.0.2:1")
    world.prefill("10.1.0.1:1")
    world.prefill("10.1.0.3:1")
    assert set(world.fleet.workers) == {"10.1.0.1:1", "10.1.0.3:1"}
    bookings = [Booking(world.fleet.workers[name].loads[0], 1.0, 10, 0.0) for name in world.fleet.workers]
    assert world.prefill("10.1.0.4:1") == ()
    assert world.prefill("10.1.0.4:1, 10.1.0.1:1") == ("10.1.0.1:1",)
    assert world.count(PREFILLER, "full") == 2
    bookings[1].settle(1.0)
    assert world.prefill("10.1.0.4:1") == ("10.1.0.4:1",)
    assert set(world.fleet.workers) == {"10.1.0.1:1", "10.1.0.4:1"}


def test_hinted_workers_not_named_for_long_are_forgotten_unless_a_discovery_names_them_too() -> None:
    world = World()
    world.prefill("10.1.0.1:1, 10.1.0.2:1, 10.1.0.3:1")
    booking = Booking(world.fleet.workers["10.1.0.3:1"].loads[0], 1.0, 10, 0.0)
    known = WorkerChange(kind=ChangeKind.ADDED, worker="10.1.0.2:1", url="http://10.1.0.2:1", role=Role.PREFILL)
    world.apply(known)
    world.now_s = 599.0
    world.targets.forget_unused()
    assert len(world.fleet.workers) == 3
    world.now_s = 601.0
    world.targets.forget_unused()
    assert set(world.fleet.workers) == {"10.1.0.2:1", "10.1.0.3:1"}
    booking.settle(1.0)
    world.targets.forget_unused()
    assert set(world.fleet.workers) == {"10.1.0.2:1"}


def test_more_targets_than_anybody_means_are_not_taken_in() -> None:
    world = World()
    assert len(world.prefill(",".join(f"10.1.1.{i}:1" for i in range(40)))) == 16
    assert len(world.fleet.workers) == 16
    assert world.count(PREFILLER, "surplus") == 24


@pytest.mark.parametrize("value", [f"{HERE}:8000", "127.0.0.1:8200", "localhost:8000"])
def test_a_pod_that_is_told_to_prefill_for_itself_does_it_locally(value: str) -> None:
    world = World(allow=("*",))
    hints = world.read((PREFILLER, value))
    assert (hints.prefill, hints.choice) == ((), "local")
    hints = world.read((PREFILLER, f"{value}, 10.1.0.1:1"))
    assert (hints.prefill, hints.choice) == (("10.1.0.1:1",), None)
    assert list(world.fleet.workers) == ["10.1.0.1:1"]


def test_each_listener_pins_its_engine_and_a_rank_header_overrules_it() -> None:
    world = World(size=3)
    engines = [f"127.0.0.1:{8200 + rank}" for rank in range(3)]
    for rank in range(3):
        assert world.read(port=8000 + rank).decode == {engines[rank]}
        by_rank = world.read(("x-data-parallel-rank", str(rank)), port=8001)
        by_endpoint = world.read(("x-data-parallel-host-port", f"{HERE}:{8000 + rank}"), port=8002)
        assert by_rank == by_endpoint == Hints(decode=frozenset({engines[rank]}))


@pytest.mark.parametrize("value", ["3", "-1", "1.0", "one", "1,2", "0x1", "99999999999", "\uff11"])
def test_a_rank_that_is_none_is_400(value: str) -> None:
    error = World(size=3).refused(("x-data-parallel-rank", value))
    assert (error.status, error.param) == (400, "x-data-parallel-rank")


@pytest.mark.parametrize(
    "value", [f"{HERE}:8003", "10.0.0.6:8000", "8000", f"{HERE}:8000,{HERE}:8001", f"http://{HERE}:8000"]
)
def test_a_rank_endpoint_of_elsewhere_is_400(value: str) -> None:
    error = World(size=3).refused(("x-data-parallel-host-port", value))
    assert (error.status, error.param) == (400, "x-data-parallel-host-port")


def test_rank_and_endpoint_must_agree() -> None:
    endpoint = ("x-data-parallel-host-port", f"{HERE}:8001")
    assert World(size=2).read(endpoint, ("x-data-parallel-rank", "1")).decode == {"127.0.0.1:8201"}
    assert World(size=2).refused(endpoint, ("x-data-parallel-rank", "0")).status == 400


def test_ranks_behind_one_port_are_the_planners() -> None:
    world = World(ranks=lambda engine: {0: 1, 1: 1}.keys())
    assert world.read(("x-data-parallel-rank", "1")) == Hints(decode=frozenset({"127.0.0.1:8200"}), rank=1)
    assert world.refused(("x-data-parallel-rank", "2")).status == 400
    silent = World()
    assert silent.read(("x-data-parallel-rank", "2")).rank is None
    assert silent.count("x-data-parallel-rank", "unknown") == 1


KV_SOURCE = "x-kv-cache-source-host-port"


def test_kv_source_is_advice_and_never_an_error() -> None:
    world = World()
    world.apply(WorkerChange(kind=ChangeKind.ADDED, worker="d9", url="http://10.9.0.1:8000", role=Role.DECODE))
    for value, source, outcome in (
        ("10.9.0.1:8000", "d9", "used"),
        ("[fd00::1]:9000", "[fd00::1]:9000", "used"),
        ("10.9.0.2:8000", None, "denied"),
        ("nonsense", None, "malformed"),
        (f"{HERE}:8000", None, "itself"),
        ("127.0.0.1:8200", None, "itself"),
    ):
        before = world.count(KV_SOURCE, outcome)
        assert world.read((KV_SOURCE, value)).kv_source == source, value
        assert world.count(KV_SOURCE, outcome) == before + 1, value
    assert world.read((KV_SOURCE, "10.1.0.1:1,10.1.0.2:1")).kv_source == "10.1.0.1:1"
    assert world.count(KV_SOURCE, "surplus") == 1
    assert {name: worker.role for name, worker in world.fleet.workers.items()} == {
        "d9": Role.DECODE,
        "[fd00::1]:9000": Role.SOURCE,
        "10.1.0.1:1": Role.SOURCE,
    }


def test_the_engine_behind_a_pods_listener_is_the_source_and_must_be_allowed_itself() -> None:
    world = World(size=2, allow=("10.1.0.0/16:8201", "10.2.0.0/16:8000"))
    assert world.read((KV_SOURCE, "10.1.0.1:8001")).kv_source == "10.1.0.1:8201"
    assert world.fleet.workers["10.1.0.1:8201"].url == "http://10.1.0.1:8201"
    assert world.read((KV_SOURCE, "10.1.0.1:8201")).kv_source == "10.1.0.1:8201"
    assert world.read((KV_SOURCE, "10.1.0.1:8000")).kv_source is None
    assert world.read((KV_SOURCE, "10.2.0.1:8000")).kv_source is None
    assert world.read((KV_SOURCE, "10.2.0.1:8000"), (PREFILLER, "10.2.0.1:8000")).kv_source == "10.2.0.1:8000"


@pytest.mark.parametrize(
    ("size", "value", "source"),
    [
        (1, "10.1.0.5:8003", "10.1.0.5:8003"),
        (1, "10.1.0.5:8000", "10.1.0.5:8200"),
        (4, "10.1.0.5:8002", "10.1.0.5:8202"),
        (4, "10.1.0.5:7999", "10.1.0.5:7999"),
        (4, "10.1.0.5:8004", "10.1.0.5:8004"),
        (1, "10.1.0.5", None),
        (1, "10.1.0.5:http", None),
        (1, "http://10.1.0.5:8000", None),
    ],
)
def test_llm_d_case_53_the_rank_of_a_source_is_told_by_its_listener(size: int, value: str, source: str | None) -> None:
    """There a rank's own P2P port is found so, and all else is rank 0's; here its engine, and all else is an engine."""
    assert World(size=size).read((KV_SOURCE, value)).kv_source == source


def test_a_gateways_sources_are_those_it_knows() -> None:
    world = World(no_pod=True)
    world.apply(WorkerChange(kind=ChangeKind.ADDED, worker="d9", url="http://10.9.0.1:8000", role=Role.DECODE))
    assert world.read((KV_SOURCE, "10.9.0.1:8000")).kv_source == "d9"
    assert world.read((KV_SOURCE, "10.1.0.1:8000")).kv_source is None
    assert list(world.fleet.workers) == ["d9"]


def test_a_source_that_is_named_as_a_prefill_target_becomes_one_and_takes_no_targets_place() -> None:
    world = World(most=2)
    assert world.read((KV_SOURCE, "10.1.0.1:1")).kv_source == "10.1.0.1:1"
    assert world.prefill("10.1.0.1:1") == ("10.1.0.1:1",)
    assert world.fleet.workers["10.1.0.1:1"].role is Role.PREFILL
    assert world.read((KV_SOURCE, "10.1.0.1:1")).kv_source == "10.1.0.1:1"
    assert world.fleet.workers["10.1.0.1:1"].role is Role.PREFILL
    assert [world.read((KV_SOURCE, f"10.1.0.{n}:1")).kv_source for n in (2, 3)] == ["10.1.0.2:1", "10.1.0.3:1"]
    assert world.prefill("10.1.0.4:1") == ("10.1.0.4:1",)
    assert len(world.fleet.workers) == 2
    assert world.prefill("10.1.0.5:1") == ("10.1.0.5:1",)
    assert world.read((KV_SOURCE, "10.1.0.6:1")).kv_source is None
    assert world.count(KV_SOURCE, "full") == 1


@pytest.mark.parametrize(
    ("value", "plan"),
    [
        ("v1;id=a-1;choice=local", ("local", "a-1")),
        ("v1; id=a ; choice=remote; n=1000; hd=16; hp=512;", ("remote", "a")),
        ("v1;choice=remote;id=a;later=x", ("remote", "a")),
        ("v2;id=a;choice=local", None),
        ("id=a;choice=local", None),
        ("v1;choice=local", None),
        ("v1;id=a", None),
        ("v1;id=a;choice=both", None),
        ("v1;id=a;choice=local;n=-1", None),
        ("v1;id=a;choice=local;hp=x", None),
        ("v1;id=a;choice=local;choice=remote", None),
        ("v1;id=a;choice=local;flag", None),
        ("v1;id=é;choice=local", None),
        ("v1;id=" + "x" * 129 + ";choice=local", None),
        ("v1;id=a;choice=local;pad=" + "x" * 512, None),
    ],
)
def test_plan(value: str, plan: tuple[str, str] | None) -> None:
    assert read_plan(value) == plan
    hints = World().read(("x-warmroute-plan", value))
    assert (hints.choice, hints.plan_id) == (plan or (None, None))


def test_two_plans_are_none() -> None:
    world = World()
    twice = [("x-warmroute-plan", "v1;id=a;choice=local"), ("x-warmroute-plan", "v1;id=b;choice=remote")]
    assert world.read(*twice).choice is None
    assert world.count("x-warmroute-plan", "malformed") == 1


def test_a_gateway_reads_targets_and_plan_but_no_rank() -> None:
    world = World(no_pod=True)
    hints = world.read(
        (PREFILLER, "10.1.0.1:1"), ("x-data-parallel-rank", "x"), ("x-warmroute-plan", "v1;id=a;choice=remote")
    )
    assert hints == Hints(prefill=("10.1.0.1:1",), choice="remote", plan_id="a")
