"""The HTTP data plane: requests in, decisions carried out, answers relayed byte for byte.

server.py    the door, drain, aiohttp's listeners  handler.py   one request from its body to its last byte
incoming.py  a client's request, however it came, and its answer     aio_incoming.py  one that aiohttp received
peer.py      a worker's server, however it is spoken to              aio_upstream.py  by aiohttp
routes.py    which paths go where                flight.py    what is booked for an attempt, given back on every way out
upstream.py  one of those for each worker        relay.py     the answer, chunk by chunk
headers.py   what may pass                       usage.py     cached tokens read off the end of an answer
body.py      a request's body, bounded           models.py    /v1/models of the whole fleet
admin.py     engine controls, fanned out         errors.py    errors in OpenAI's shape
access.py    one log line per request            parts.py     what all requests share
connection.py  what is answered to, and logged of, requests that are no HTTP
"""
