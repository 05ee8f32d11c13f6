"""`warmroute doctor`: what keeps routing by cache from working on these vLLM servers, and which flag puts it right.

catalogue.py  every finding: code, severity, why it matters, what to change     findings.py  one finding, one report
fetch.py      HTTP, with every way it can fail told apart     identity.py  answers -> what a server is, and its faults
tap.py        the gateway's own event ingestion, watched       probe.py     random prompts through it and back
events.py     what the tap and the probes saw -> findings      tokenizer.py local ids against the engine's
fleet.py      several servers against each other               examine.py   one server from start to end
report.py     lines and JSON                                   command.py   the command
"""
