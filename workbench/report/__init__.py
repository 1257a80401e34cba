"""Tables, charts and HTML from a verdict, whoever made it."""
