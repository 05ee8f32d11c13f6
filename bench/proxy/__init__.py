"""Routers by themselves on one core: what a request and a streamed chunk cost them, ours with its decision on."""
