"""What the gateway says of itself: health, readiness, metrics, the debug pages and `explain`.

metrics.py   counters of the data plane          gauges.py    what is read off the parts when somebody asks
health.py    /health and /readyz                 hits.py      predicted against actual cached tokens
prefixes.py  which prefixes save most            cache.py     /debug/cache
explain.py   /debug/explain and its command      faces.py     the pages by path
decisions.py the last decisions                  pace.py      times to first tokens and between tokens, by second
state.py     the fleet at a glance               stream.py    what has changed of it, once a second, to all who watch
page.html    shows that to people (page.py)      remedies.py  what to do about each degradation
"""
