"""A fleet of real processes under load, one fault after another (`make test-faults`, docs/proof.md).

fleet.py    Redis, engines, an indexer and gateways, and what stands between them
process.py  a process that is killed and started again, as a service manager would
engine.py   a fake engine in a process of its own, which tells what its cache really holds
link.py     a TCP proxy that delays, resets, swallows
broken.py   which connections were broken when, and so which requests are excused
load.py     clients, and what became of their requests
truth.py    what every answer must be
trial.py    one fault: load, the fault, healing, and all that must hold then
test_*.py   the faults
"""
