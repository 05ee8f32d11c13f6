"""`warmroute advise`: arguments and readings of running servers; the answer is worked out in `bench.advise`."""
