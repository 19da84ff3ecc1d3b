"""The demo's corpus."""
