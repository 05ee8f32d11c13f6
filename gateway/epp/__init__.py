"""The picker behind Envoy: what `gateway.extproc` asks, answered by the planner.

run.py         the parts put together       picker.py    one request: from an Ask to a Pick or a Refusal
watching.py    what becomes of it           unseen.py    bookings of responses that nobody shows us
control.py     headers in                   carrying.py  a plan as headers
places.py      workers as ip:port           addressed.py URLs with names, resolved
objectives.py  names -> priorities          rewrites.py  models -> weighted targets
refusals.py    errors as the data plane's   outcome.py   what a sidecar says it did
local_reply.py what a proxy makes up        parts.py, metrics.py   what they share and count
"""
