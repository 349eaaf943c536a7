"""``horovod.common.exceptions``."""

from qsgd_hpc.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
