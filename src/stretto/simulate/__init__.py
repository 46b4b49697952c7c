"""`stretto simulate`: the real controller, ledger and schedules in a simulated cluster."""
