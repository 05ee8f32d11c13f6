"""Who may ask, and how much: API keys, their limits, and the token of the admin port."""
