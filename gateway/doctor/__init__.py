"""`warmroute doctor`: what keeps routing by cache from working on these vLLM servers, and which flag puts it right.

catalogue.py  every finding: code, severity, why it matters, what to change     findings.py  one finding, one report
fetch.py      HTTP, with every way it can fail told apart     identity.py  answers -> what a server is, and its faults
tap.py        the gateway's own event ingestion, watched       probe.py     random prompts through it and back
events.py     what the tap and the probes saw -> findings      tokenizer.py local ids against the engine's
fleet.py      several servers against each other               clock.py     Date headers -> how clocks differ
team.py       workers that hand prompts over, start to end     pairs.py     prefill and decode workers compared
handoff.py    a prompt from one to the other                   side_channel.py  where NIXL's handshakes go
transfers.py  what engines count of their transfers            gateway.py   what a running gateway sees
examine.py    all servers from start to end                    report.py    lines and JSON
command.py    the command                                      catalogue_pd.py  findings about prefill and decode
"""
