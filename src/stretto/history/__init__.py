"""What was generated before: the log of rollouts, and what is computed from it."""
