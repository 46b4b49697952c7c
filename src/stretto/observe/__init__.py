"""What a run tells the world: metrics, trackers, live progress. It decides nothing."""
