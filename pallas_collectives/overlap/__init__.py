"""Products and pipelines that hide the wire behind computation."""
