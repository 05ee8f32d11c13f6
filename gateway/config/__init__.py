"""One typed, strict configuration. `load_config` reads it; `schema` declares every key."""

from gateway.config.load import ConfigError, load_config, load_workers
from gateway.config.schema import Config, Worker

__all__ = ["Config", "ConfigError", "Worker", "load_config", "load_workers"]
