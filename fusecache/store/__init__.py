"""The SSD tier: content-addressed blocks in append-only segments, shared by all mounts."""

from fusecache.store.log import Log
from fusecache.store.store import Store
from fusecache.store.types import DirectoryState, Location, StoreSettings, Usage, Version

__all__ = ["DirectoryState", "Location", "Log", "Store", "StoreSettings", "Usage", "Version"]
