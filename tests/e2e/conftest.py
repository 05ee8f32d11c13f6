"""Real engines for the end-to-end tests, started once per run. See engines.py and setup.sh."""

import pathlib
import shutil
import signal
import sys
from collections.abc import Generator, Iterator

import pytest

# The helpers beside the tests; pytest's importlib mode leaves sys.path alone.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from engines import REPOSITORY, VllmServer, free_port, running, serving
from gateway_process import reports
from pd_fleet import PdFleet
from tampering_proxy import TamperingProxy

LOGS = REPOSITORY / ".e2e" / "logs"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a real engine."""
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the end of each engine's log."""
    report = yield
    if report.failed:
        report.sections += [(f"engine {server.name}", server.log_tail()) for server in running]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reports:
        terminalreporter.section("figures")
        for figure in reports:
            terminalreporter.line(figure)


@pytest.fixture(scope="session", autouse=True)
def _terminated_runs_stop_their_engines() -> Iterator[None]:
    """SIGTERM (a CI time limit) ends the run as Ctrl-C does, so that the fixtures below are torn down."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture(scope="session")
def engine_logs() -> pathlib.Path:
    """An empty folder for the engines' logs; it outlives the run."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    return LOGS


@pytest.fixture(scope="session")
def three_servers(engine_logs: pathlib.Path) -> Iterator[list[VllmServer]]:
    """Three like engines: model `tiny` (alias `tiny-alias`), adapter `l1`, so few blocks that eviction happens.

    Shared by all tests, so their caches are not empty. A test that stops or freezes one leaves it serving.
    """
    environment = {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    servers = [
        VllmServer(f"engine{number}", engine_logs, num_blocks=120, environment=environment) for number in range(3)
    ]
    with serving(servers):
        yield servers


@pytest.fixture(scope="session")
def engine(three_servers: list[VllmServer]) -> VllmServer:
    """The first of the three."""
    return three_servers[0]


@pytest.fixture(scope="session")
def pd_servers(engine: VllmServer, engine_logs: pathlib.Path) -> Iterator[PdFleet]:
    """Two prefill and two decode servers beside the plain `engine`, started when the first test asks for them."""
    fleet = PdFleet(engine, engine_logs)
    with serving(fleet.servers):
        yield fleet


@pytest.fixture
def fleet(pd_servers: PdFleet) -> Iterator[PdFleet]:
    """The same, and whatever a test does to them: no engine may be dead at its end."""
    yield pd_servers
    pd_servers.assert_alive()


@pytest.fixture(scope="module")
def proxy(pd_servers: PdFleet) -> Iterator[TamperingProxy]:
    """Before the second prefill server."""
    with TamperingProxy(pd_servers.prefill[1].url, free_port()) as proxy:
        yield proxy
