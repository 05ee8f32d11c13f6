"""Suites of the data plane hold on both ways to speak HTTP."""

import pytest

from tests.support.planes import event_loop_policy, http_plane, on_both

__all__ = ["event_loop_policy", "http_plane"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_both(metafunc)
