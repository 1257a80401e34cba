"""What is to be measured, and what was: arms, profile, plans, run log."""
