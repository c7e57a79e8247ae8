"""The errno boundary: what a handler raises, and what the reader gets."""

from __future__ import annotations

import errno
import logging

import pyfuse3
import pytest
import trio

from fusecache import _native
from fusecache.base.errors import OriginChanged, OriginError, UnknownInode
from fusecache.read.operations import answers


def errno_for(error: BaseException) -> int:
    @answers
    async def handler() -> None:
        raise error

    with pytest.raises(pyfuse3.FUSEError) as caught:
        trio.run(handler)
    return int(caught.value.errno)


def test_what_the_origin_and_the_table_say_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupError) as unknown:
        _native.version(2**31)
    assert isinstance(unknown.value, UnknownInode)
    assert str(unknown.value) == f"unknown inode {2**31}"
    assert errno_for(unknown.value) == errno.ESTALE
    assert errno_for(OriginChanged()) == errno.ESTALE
    assert errno_for(OriginError(errno.EACCES)) == errno.EACCES
    assert errno_for(pyfuse3.FUSEError(errno.ENOSYS)) == errno.ENOSYS
    assert not caplog.records


@pytest.mark.parametrize("error", [KeyError("no such setting"), IndexError(3), RuntimeError()])
def test_what_nobody_expects_is_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert errno_for(error) == errno.EIO
    (record,) = caplog.records
    assert record.getMessage() == "unexpected failure in handler"
    assert record.exc_info is not None
    assert record.exc_info[1] is error
