"""The control volumes of this node's pods as the agent writes them. Everything here blocks, and runs in threads.

Init clears the volume and says hello when its container starts. So what is meant for one incarnation is written only while that
one lives; what is left of the race, the next writer displaces.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from vllmsnapshot_child import protocol
from vllmsnapshot_child.protocol import Hello, Message, Oracle, Restored

from ..api.constants import Reason
from .control import Files, control_path, read_files, write_restored
from .errors import RestoreError

log = logging.getLogger(__name__)


class Volumes:
    """By UID of the pod. `wrote` is called with the name of each file that was written."""

    def __init__(self, kubelet_dir: str, wrote: Callable[[str], None]) -> None:
        self._kubelet_dir = kubelet_dir
        self._wrote = wrote

    def path(self, uid: str) -> str:
        """The directory on the host."""
        return os.path.normpath(control_path(self._kubelet_dir, uid))

    def read(self, uid: str) -> Files | None:
        """All files at once; None if there is no volume. Never raises."""
        return read_files(self.path(uid))

    def write(self, uid: str, message: Message, *, exclusive: bool = False) -> bool:
        """Write a file; False if it is there already and must not be replaced, or is nobody's any more. Raises OSError."""
        with protocol.open_dir(self.path(uid)) as fd:
            hello = Hello.load(fd)
            if hello is None or hello.incarnation != message.incarnation:
                log.info("pod %s: %s is not written, its container has started over", uid, message.FILE)
                return False
            written = message.save(fd, exclusive=exclusive)
        self._wrote(message.FILE)
        return written

    def write_restored(self, uid: str, message: Restored, phases: Mapping[str, float], oracle: Oracle | None) -> None:
        """Tell init that its tree is there, with notes for an agent after us. Raises OSError."""
        with protocol.open_dir(self.path(uid)) as fd:
            write_restored(fd, message, phases, oracle)
        self._wrote(message.FILE)

    def insist(self, uid: str, incarnation: str) -> None:
        """Raises RestoreError if the container has started over since that incarnation."""
        with protocol.open_dir(self.path(uid)) as fd:
            hello = Hello.load(fd)
        if hello is None or hello.incarnation != incarnation:
            raise RestoreError(Reason.RESTORE_DIED, "the container started over in the meantime")
