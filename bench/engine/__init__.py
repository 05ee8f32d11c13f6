"""A vLLM engine without a model: `model` is pure, `server` drives it by wall clock behind vLLM's HTTP and ZMQ faces."""
