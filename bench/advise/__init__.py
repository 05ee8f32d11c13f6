"""Whether splitting prefill from decode pays for somebody's traffic: simulated, and said in plain language.

model_config.py, layers.py, weights.py  a config.json -> KV bytes, parameters, FLOP     gpu.py      data sheets
anchors.py  servers whose times are known     scale.py    any other, by a roofline law   server.py   times and KV pool
network.py  transfers and block sizes        capacity.py conversations held            traffic.py  traces, parts of them
drawn.py    traffic made from histograms      splits.py   fleets, simulated              verdict.py  which of them
advice.py   question -> advice                report.py   text and JSON                  plot.py     a picture
"""
