"""A request served by two engines: one computes the prompt, the other takes over its KV and answers."""
