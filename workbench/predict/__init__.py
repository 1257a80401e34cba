"""What can be known before a server is started: does it fit, and what will it take."""
