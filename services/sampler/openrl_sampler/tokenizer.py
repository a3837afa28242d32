"""A model directory's tokenizer, read when somebody needs it, and its end tokens. Never looks anything up on a hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from openrl_common.errors import Rejected

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """``exists`` says whether the directory has one, without reading it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded: Any = None
        # Asked first, because transformers makes an empty tokenizer of a known model type out of nothing.
        self.exists = any((path / name).is_file() for name in _FILES)

    def load(self) -> Any:
        """Raises Rejected when the directory has no usable tokenizer."""
        if self._loaded is None and not self.exists:
            raise Rejected(f"{self._path} has no tokenizer", code="no-tokenizer")
        if self._loaded is None:
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
            except Exception as error:  # whatever transformers raises on files that are no tokenizer
                raise Rejected(
                    f"the tokenizer of {self._path} cannot be loaded: {error}", code="no-tokenizer"
                ) from error
        return self._loaded

    def need_for_stop_strings(self) -> None:
        """Raises Rejected ``bad-params`` with what to use instead."""
        try:
            self.load()
        except Rejected as error:
            raise Rejected(f"stop strings need a tokenizer: {error}; use stop_token_ids", code="bad-params") from error

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.load().decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def eos(self) -> frozenset[int]:
        """The model's end tokens: of its generation config, else its config, else its tokenizer."""
        for name in ("generation_config.json", "config.json"):
            try:
                fields = msgspec.json.decode((self._path / name).read_bytes())
            except (OSError, msgspec.DecodeError):
                continue
            text = fields.get("text_config")
            for holder in (fields, text if isinstance(text, dict) else {}):
                eos = holder.get("eos_token_id")
                if eos is not None:
                    return frozenset([eos] if isinstance(eos, int) else eos)
        eos = self.load().eos_token_id if self.exists else None
        return frozenset() if eos is None else frozenset([eos])
