"""The log: immutable events in one LMDB environment per run."""
