"""The cache directories apart from their data: names, locks, `format`, `set` and `high`."""

from fusecache.store.directory.directory import Directory
from fusecache.store.directory.member import Member

__all__ = ["Directory", "Member"]
