"""Hypothesis profiles: a quick one for the desk, a thorough one for CI (`CI=true`).

And a log level that no test leaves behind.
"""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support import IN_CI

_ON_BUSY_MACHINES = [HealthCheck.too_slow]
"""How long it takes to make an example up says how busy the machine is."""
settings.register_profile(
    "fast", max_examples=100, deadline=None, derandomize=False, suppress_health_check=_ON_BUSY_MACHINES
)
settings.register_profile(
    "ci", max_examples=300, deadline=None, derandomize=False, suppress_health_check=_ON_BUSY_MACHINES
)
settings.load_profile("ci" if IN_CI else "fast")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
