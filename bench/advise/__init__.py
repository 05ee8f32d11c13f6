"""Whether splitting prefill from decode pays for somebody's traffic: simulated, priced, and said in plain language."""
