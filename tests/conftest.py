"""Hypothesis profiles: a quick one for the desk, a thorough one for CI (`CI=true`).

And a log level that no test leaves behind.
"""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support import IN_CI

settings.register_profile("fast", max_examples=100, deadline=None, derandomize=False)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=False)
settings.load_profile("ci" if IN_CI else "fast")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
