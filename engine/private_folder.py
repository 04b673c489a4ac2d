"""Where files go that no setting gives a place: a folder that no other user of the host writes to."""

import os
import stat
import tempfile
from pathlib import Path

from engine.errors import ConfigError


def private_folder() -> Path:
    """Return this user's folder among the temporary ones; it is made when it is missing.

    Raises:
        ConfigError: somebody else made it, or can write to it: what is opened in there by its name
            could then be a link to a file of this user.
    """
    folder = Path(tempfile.gettempdir()) / f"tokenmill-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder} is no folder that this user alone writes to; remove it, or set "
            "engine.log_dir, and engine.runtime.profile_dir for traces"
        )
    return folder
