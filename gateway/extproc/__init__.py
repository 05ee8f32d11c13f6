"""Endpoint picking behind Envoy: the protocol (`session`), its transport (`server`), what it speaks of (`types`)."""
