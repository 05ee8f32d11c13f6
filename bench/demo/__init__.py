"""`warmroute demo`: the real gateway over fake engines on this machine. No GPU, no vLLM, no downloads."""
