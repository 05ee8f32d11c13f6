"""What engine controls do to what we know of an engine."""

import pytest

from gateway.proxy.routes import CONTROLS


@pytest.mark.parametrize(
    ("path", "query", "clears"),
    [
        ("/pause", {}, True),
        ("/pause", {"clear_cache": "true"}, True),
        ("/pause", {"clear_cache": "False"}, False),
        ("/reset_prefix_cache", {}, True),
        ("/sleep", {"level": "2"}, True),
        ("/wake_up", {}, False),
        ("/v1/load_lora_adapter", {}, False),
    ],
)
def test_which_controls_empty_the_cache(path: str, query: dict[str, str], clears: bool) -> None:
    assert CONTROLS[path].clears_cache(query) is clears


def test_adapters_come_and_go_under_both_names() -> None:
    assert {path for path, control in CONTROLS.items() if control.models} == {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
    }
