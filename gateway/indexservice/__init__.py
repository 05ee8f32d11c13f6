"""The index as a service: `warmroute indexer`, and what a gateway that goes by one has in place of its own events."""
