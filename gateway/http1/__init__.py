"""HTTP/1.1 on bare connections, for what is asked most: inference requests and their streams.

server side   head.py the grammar of a request's head     chunked.py bodies in chunks     request.py one request, an
              `Incoming`     connection.py a client's connection     listener.py all of them; what is no inference goes
              on to aiohttp with its connection
worker side   upstream.py a worker's connections, an `Upstream`     answer.py one exchange     wire.py one connection,
              read by llhttp
both          expiry.py one timer for many
"""
