"""Training states on disk (``save_state``): where they lie and what the files say of themselves.

    <home>/state/<tenant>/<job>/<name>.safetensors

Invariants: a name never leaves its job's directory; a file's bytes depend on the training log alone; reading a state's
description reads its header and no tensor data.

Not here: the tensors (that needs torch and belongs to the trainer).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from openrl_common.errors import Rejected
from openrl_common.names import check_job, check_name, check_tenant
from openrl_common.records import SavedState, StateInfo
from openrl_common.tensors import read_metadata

_NAME_CHARACTERS_MAX = 64


def state_directory(home: Path, tenant: str, job: str) -> Path:
    return home / "state" / check_tenant(tenant) / check_job(job)


def state_path(home: Path, tenant: str, job: str, name: str) -> Path:
    """Raises Rejected (``bad-name``)."""
    checked = check_name("state name", name, _NAME_CHARACTERS_MAX)
    return state_directory(home, tenant, job) / f"{checked}.safetensors"


def read_info(path: Path) -> StateInfo:
    """What a state file says of itself; empty when it says nothing.

    Raises:
        Rejected: the file is no complete safetensors file.
    """
    try:
        return msgspec.json.decode(read_metadata(path).get("openrl", "{}"), type=StateInfo)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Rejected(f"{path}: its description is not usable ({error})", code="bad-state") from error


def list_states(home: Path, tenant: str, job: str = "") -> list[SavedState]:
    """The named states of one job, or of every job of the tenant; sorted by job and name, without damaged files."""
    pattern = f"{check_job(job)}/*.safetensors" if job else "*/*.safetensors"
    found = []
    for path in sorted((home / "state" / check_tenant(tenant)).glob(pattern)):
        try:
            info = read_info(path)
        except Rejected:
            continue
        info = info if info.job else StateInfo(tenant=tenant, job=path.parent.name)
        size = path.stat()
        saved = SavedState(name=path.stem, bytes=size.st_size, saved_at=size.st_mtime, path=str(path), info=info)
        found.append(saved)
    return found


def delete_state(home: Path, tenant: str, job: str, name: str) -> bool:
    """Remove a named state; False when there is none. Raises Rejected (``bad-name``)."""
    try:
        state_path(home, tenant, job, name).unlink()
    except FileNotFoundError:
        return False
    return True
