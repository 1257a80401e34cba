"""One module a notebook, and what they share: tables, charts' data and the last sentence."""
