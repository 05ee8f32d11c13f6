"""gRPC over HTTP/2 as a server speaks it with a few trusted proxies, read and written by ourselves.

Frames come and go in `connection`, without I/O, their header blocks in `blocks`; `calls` makes gRPC messages of them;
`listener` has the sockets.
"""
