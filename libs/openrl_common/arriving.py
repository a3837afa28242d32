"""``from_pretrained`` beside the prefetching of its checkpoint (R1): the model is built, and its tensors are taken to
their device, while later ones are still read.

transformers opens safetensors files by ``safe_open`` and takes every tensor out in one of its threads, in the order in
which they are read here. For the time of a load that name leads to the same files, whose tensors wait until they are in
the page cache. What is loaded and how is transformers' own business, as ever.

Why waiting, when touching a mapped page waits for it as well: on a page that nobody has asked for yet the kernel would
read in its own small steps, and a page that cannot be read is the end of the process instead of an error with a name.

Invariants: tensors are those of ``from_pretrained``, bit for bit; transformers is as before after the load, failed or
not; where the name is gone in another version, the load begins when all is read. One load at a time in a process.

Not here: torch and transformers (the caller has them), what is read when (prefetch.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrl_common.prefetch import Prefetch

_OPENER = "safe_open"


def load_arriving(
    transformers: Any, directory: Path, *, dtype: Any, device: Any, prefetch: Prefetch | None = None
) -> Any:
    """A causal language model from a local directory, on its device. Blocking.

    Args:
        transformers: the package.
        dtype, device: torch's.
        prefetch: runs in another thread. None: nothing is prefetched, or all of it was.

    Raises:
        Rejected: ``checkpoint-unreadable``, as ``prefetch`` found it. All else is what ``from_pretrained`` raises.
    """
    with _tensors_wait(transformers.modeling_utils, prefetch):
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, dtype=dtype, device_map={"": device}
        )


@contextmanager
def _tensors_wait(modeling: Any, prefetch: Prefetch | None) -> Iterator[None]:
    opener = getattr(modeling, _OPENER, None)
    if prefetch is None:
        yield
    elif opener is None:
        prefetch.wait_for_all()
        yield
    else:
        setattr(modeling, _OPENER, lambda *arguments, **named: _File(opener(*arguments, **named), prefetch))
        try:
            yield
        except Exception:
            prefetch.check()  # said by its name rather than by what the loader made of it
            raise
        finally:
            setattr(modeling, _OPENER, opener)


class _File:
    """An open safetensors file; all but its tensors is the file's own."""

    def __init__(self, file: Any, prefetch: Prefetch) -> None:
        self._file = file
        self._prefetch = prefetch

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), name, self._prefetch)

    def get_tensor(self, name: str) -> Any:
        self._prefetch.wait_for(name)
        return self._file.get_tensor(name)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Any:
        return self._file.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Slice:
    """A tensor that is not there yet: its shape and dtype are, its elements when it is indexed."""

    def __init__(self, tensor: Any, name: str, prefetch: Prefetch) -> None:
        self._tensor = tensor
        self._name = name
        self._prefetch = prefetch

    def __getitem__(self, index: Any) -> Any:
        self._prefetch.wait_for(self._name)
        return self._tensor[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)
