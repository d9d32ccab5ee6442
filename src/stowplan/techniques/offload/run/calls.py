"""The calls to the operating system that a spill file makes, all in one place."""

import os


class SystemCalls:
    """Each raises OSError if the system refuses, and may transfer less than it was asked for."""

    def allocate(self, file: int, offset: int, nbytes: int) -> None:
        """Have the disk set room aside, so that no later write runs out of it."""
        os.posix_fallocate(file, offset, nbytes)

    def write(self, file: int, data: memoryview, offset: int) -> int:
        """Write from `data`; returns how many bytes were."""
        return os.pwrite(file, data, offset)

    def read(self, file: int, data: memoryview, offset: int) -> int:
        """Read into `data`; returns how many bytes were."""
        return os.preadv(file, [data], offset)

    def flush(self, file: int) -> None:
        """Have what was written leave memory, where the system had kept it."""
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
