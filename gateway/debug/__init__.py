"""What the gateway says of itself: health, readiness, metrics, the debug pages and `explain`.

metrics.py   counters of the data plane          gauges.py    what is read off the parts when somebody asks
health.py    /health and /readyz                 hits.py      predicted against actual cached tokens
prefixes.py  which prefixes save most            cache.py     /debug/cache
explain.py   /debug/explain and its command      faces.py     the pages by path
"""
