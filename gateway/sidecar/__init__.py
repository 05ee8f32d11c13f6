"""The face in a decode pod: it stands before the engine, obeys hand-off headers, and passes the rest on.

run.py       the parts put together               hints.py     control headers -> Hints
targets.py   prefill workers named by hints       allow.py     which of them may be named
endpoint.py  host:port, exactly                   passing.py   everything that is no inference, to the engine as it is
"""
