"""What a request would cost where: the planner, the fleet's ledger, predicted seconds, policies. No I/O."""
