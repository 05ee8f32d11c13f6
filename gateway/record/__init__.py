"""What the fleet is asked, as a trace: lengths, times and what prompts share, and nothing they say."""
