"""Settings of all tests."""

from hypothesis import settings

# Two busy cores make single examples slow at times; pytest's own timeout guards against hangs.
settings.register_profile("rolltape", deadline=None, max_examples=60)
settings.load_profile("rolltape")
