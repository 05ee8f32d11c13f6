"""Everything of warmroute that touches a network, a clock or a file: the command, the configuration and the faces."""
