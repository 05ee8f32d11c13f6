"""Memory that processes share: places, seats, books of keys."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest

from gateway.auth.keys import Key
from gateway.auth.limits import Account, Exceeded
from gateway.processes.books import BYTES, Books, SharedAccount
from gateway.processes.seats import N_SEATS, OtherLayoutError, Table
from tests.support.auth import made


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table.create(BYTES)
    yield table
    os.close(table.fd)


def test_places_are_everybodys(table: Table) -> None:
    a, b = table.seat(table.take_seat()), table.seat(table.take_seat())
    assert [a.take(3), b.take(3), b.take(3)] == [True] * 3
    assert not a.take(3)
    assert not b.take(3)
    assert a.served == b.served == 3
    a.give_back()
    assert b.take(3)
    a.begin_body()
    b.begin_body()
    assert a.bodies == 2


def test_a_cleared_seat_gives_back_what_it_had_and_is_taken_again(table: Table) -> None:
    dead = table.take_seat()
    table.seat(dead).take(9)
    alive = table.seat(table.take_seat())
    alive.take(9)
    table.clear_seat(dead)
    assert alive.served == 1
    assert table.take_seat() == dead
    assert table.seat(dead).served == 1


def test_who_has_more_connections_gives_way(table: Table) -> None:
    a, b = table.seat(table.take_seat()), table.seat(table.take_seat())
    assert not a.has_many(7), "nobody else accepts"
    assert not b.has_many(0)
    assert a.has_many(7)
    assert not b.has_many(6)
    b.leaves()
    assert not a.has_many(7)


def test_seats_run_out_with_a_word(table: Table) -> None:
    for _ in range(N_SEATS):
        table.take_seat()
    with pytest.raises(RuntimeError, match="no seat"):
        table.take_seat()


def test_a_table_of_another_layout_is_not_read() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, BYTES)
    with pytest.raises(OtherLayoutError):
        Table(fd)
    os.close(fd)


def key(**limits: int) -> Key:
    return made(**limits)[1]


def account(table: Table, seat: int, of: Key, now_s: float = 0.0) -> Account:
    return Books(table, seat).account(of, now_s)


def test_a_keys_requests_are_counted_once_whoever_takes_them(table: Table) -> None:
    seats = [table.take_seat(), table.take_seat()]
    of = key(requests_per_minute=4)
    a, b = (account(table, seat, of) for seat in seats)
    for each in (a, b, a, b):
        each.enter(0.0)
    for each in (a, b):
        with pytest.raises(Exceeded, match="requests"):
            each.enter(0.0)
    assert dict(b.headers(0.0))["x-ratelimit-remaining-requests"] == "0"
    b.enter(15.0)  # A quarter of a minute brings one back, and not one for each.
    with pytest.raises(Exceeded):
        a.enter(15.0)


def test_tokens_are_reserved_and_settled_by_all(table: Table) -> None:
    of = key(tokens_per_minute=100)
    a, b = (account(table, table.take_seat(), of) for _ in range(2))
    reserved = a.reserve(60, 20, 0.0)
    with pytest.raises(Exceeded, match="tokens"):
        b.reserve(30, 0, 0.0)
    a.settle(reserved, 50, 0.0)
    assert b.reserve(30, 20, 0.0) == 50


def test_concurrency_is_of_all_and_a_killed_process_gives_its_own_back(table: Table) -> None:
    seats = [table.take_seat(), table.take_seat()]
    of = key(concurrent_requests=2)
    a, b = (account(table, seat, of) for seat in seats)
    a.enter(0.0)
    b.enter(0.0)
    with pytest.raises(Exceeded, match="concurrent"):
        b.enter(0.0)
    Books(table, 0).clear_seat(seats[0])
    b.enter(0.0)
    with pytest.raises(Exceeded, match="concurrent"):
        b.enter(0.0)
    b.leave()
    b.enter(0.0)


def test_a_limit_that_changes_is_put_right_once(table: Table) -> None:
    """Each process reads the file, and each of them tells its account."""
    before = key(requests_per_minute=10)
    after = Key(tenant=before.tenant, sha256=before.sha256, requests_per_minute=4)
    a, b = (account(table, table.take_seat(), before) for _ in range(2))
    for _ in range(3):
        a.enter(0.0)
    a.configure(after.limits, 0.0)
    b.configure(after.limits, 0.0)
    assert dict(a.headers(0.0))["x-ratelimit-remaining-requests"] == "1"
    assert dict(b.headers(0.0))["x-ratelimit-limit-requests"] == "4"


def test_keys_without_limits_have_accounts_too_and_names_keep_apart(table: Table) -> None:
    seat = table.take_seat()
    books = Books(table, seat)
    free, one, other = key(), made(name="one", concurrent_requests=1)[1], made("rival", concurrent_requests=1)[1]
    for each in (free, one, other):
        each_account = books.account(each, 0.0)
        assert isinstance(each_account, SharedAccount)
        each_account.enter(0.0)
    with pytest.raises(Exceeded):
        books.account(one, 0.0).enter(0.0)


def _enter_many(fd: int, seat: int, of: Key, n: int) -> None:
    mine = Books(Table(fd), seat).account(of, time.monotonic())
    for _ in range(n):
        mine.enter(time.monotonic())
        mine.settle(0, 1, time.monotonic())


def test_processes_lose_no_count_to_each_other(table: Table) -> None:
    of = key(requests_per_minute=1 << 40, tokens_per_minute=1 << 40)
    at_first = account(table, table.take_seat(), of, time.monotonic())
    fork = multiprocessing.get_context("fork")
    them = [
        fork.Process(target=_enter_many, args=(table.fd, table.take_seat(), of, 500), daemon=True) for _ in range(3)
    ]
    for each in them:
        each.start()
    for each in them:
        each.join(60)
        assert each.exitcode == 0
    assert at_first.running == 0
    at_first.headers(time.monotonic())  # Reads what all have said.
    assert at_first.running == 1500
