"""From the run log to the verdict, or to the reasons why there is none."""
