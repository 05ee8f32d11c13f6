"""Requests that wait here, not in an engine, while all engines that could serve them have enough waiting inside."""
