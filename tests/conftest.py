"""Settings of all tests."""

from hypothesis import settings

# Two busy cores make single examples slow at times; pytest's own timeout guards against hangs. The examples are
# the same in every run, so a test that passed fails only by a change; `make soak` draws new ones each time.
settings.register_profile("rolltape", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile("rolltape")
