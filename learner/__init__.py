"""Owns the learner: closed groups become updates, and every update can be re-derived from the log."""
