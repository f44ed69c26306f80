"""Search back-ends: one file each, and the service that caches what they find."""
