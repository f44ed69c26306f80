"""Owns what a log says of the release that wrote it."""

import msgspec

from core.events import SCHEMA_VERSION
from store import codec
from store.keys import Table
from store.projections import PROJECTION_VERSION

FORMAT_VERSION = 1
"""Of keys, values and bundles. A change of any of them that an older release would misread raises it."""

VERSIONS_KEY = b"versions"


class Versions(msgspec.Struct, frozen=True):
    """What a log says of itself; stored under VERSIONS_KEY."""

    format: int = FORMAT_VERSION
    schema: int = SCHEMA_VERSION
    projections: int = PROJECTION_VERSION


THIS_RELEASE = Versions()


def pack_versions(versions: Versions = THIS_RELEASE) -> bytes:
    """Return the stored form of a log's versions, by default this release's."""
    return codec.pack(Table.META, VERSIONS_KEY, msgspec.msgpack.encode(versions))
