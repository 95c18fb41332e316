"""The three backends, and which of them serves a call (see `backends.choice`)."""
