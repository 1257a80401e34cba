"""One run's folder: its log and loop, its recording, its provenance, and who is at work on it."""
