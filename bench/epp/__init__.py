"""Endpoint pickers behind a real Envoy: what they take for each request and each streamed chunk."""
