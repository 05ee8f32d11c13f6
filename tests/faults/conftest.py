"""One fleet for all faults, and figures of each at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.fleet import Fleet
from tests.faults.load import Load
from tests.faults.trial import Trials, table

_ROWS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1, help="of what clients ask, and whom faults meet (1)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--seed", 1))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def trials(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, seed: int
) -> AsyncIterator[Trials]:
    async with Fleet(tmp_path_factory.mktemp("faults"), seed) as fleet:
        load = Load(fleet.broken, seed, n_clients=8, pause_s=0.6)
        trials = Trials(fleet, load)
        yield trials
        await load.stop()
        pytestconfig.stash[_ROWS] = table(trials.rows)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        terminalreporter.section(f"faults, --seed {config.getoption('--seed', 1)}")
        for row in rows:
            terminalreporter.write_line(row)
        terminalreporter.write_line('One alone: make test-faults ARGS="-k redis"')
