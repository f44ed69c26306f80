"""Owns the search that finds nothing: a control that shows what a policy remembers without reading."""

from rollout.search.base import Found, found


class NoSearch:
    """Finds nothing, at once."""

    name = "none"
    version = "1"

    def __repr__(self) -> str:
        return "<NoSearch>"

    async def search(self, query: str, top_k: int) -> Found:
        """Return an empty result."""
        del query
        return found([], top_k)

    async def aclose(self) -> None:
        """Nothing is held."""
