"""What the gateway itself takes, for `python -m bench micro`, which knows the inner rooms only."""
