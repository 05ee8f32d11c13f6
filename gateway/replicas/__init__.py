"""Replicas of a gateway or picker tell each other through Redis or Valkey what they have in flight."""

from gateway.replicas.replicas import Replicas

__all__ = ["Replicas"]
