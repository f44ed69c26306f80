"""Everything that samples and trains: the SDK session and the embedded engine."""
