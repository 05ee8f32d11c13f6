"""`warmroute gateway --processes N`: one gateway of several processes on one machine (docs/processes.md)."""
