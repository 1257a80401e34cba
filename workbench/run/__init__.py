"""One run's folder: its log and loop, its recording, where it comes from, and who is at work on it."""
