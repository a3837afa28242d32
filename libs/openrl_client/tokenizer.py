"""Text to tokens on the client's side. Only recipes need it; the SDK itself speaks token ids.

The model directory decides: ``tokenizer.json`` through the light ``tokenizers`` package; a chat template, where the
model has one, through transformers (imported then only). Nothing is ever looked up on a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from openrl_client.errors import Rejected

_END_NAMES = ("<eos>", "</s>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<eot>")


class Tokenizer:
    """Encodes prompts (with the chat template, if the model has one) and decodes completions.

    Args:
        chat: None = use the model's chat template if there is one.

    Raises:
        Rejected: ``model-unreadable``, with the path and what was missing; ``missing-package``.
    """

    def __init__(self, directory: str | Path, *, chat: bool | None = None) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not self.directory.is_dir():
            what = "is a file: give its directory" if self.directory.exists() else "does not exist"
            raise Rejected(f"model {str(self.directory)!r} {what}", code="model-unreadable")
        if not path.is_file():
            raise Rejected(f"model {str(self.directory)!r}: no tokenizer.json there", code="model-unreadable")
        try:
            import tokenizers
        except ImportError:
            raise Rejected(
                "recipes need the tokenizers package: pip install tokenizers", code="missing-package"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise Rejected(f"{path}: not a tokenizer ({error})", code="model-unreadable") from None
        self.eos_ids = self._find_eos()
        has_template = (self.directory / "chat_template.jinja").is_file() or bool(
            self._read_json("tokenizer_config.json").get("chat_template")
        )
        if chat and not has_template:
            raise Rejected(f"model {str(self.directory)!r} has no chat template", code="model-unreadable")
        self._chat = self._load_chat() if (has_template if chat is None else chat) else None

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode((self.directory / name).read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise Rejected(f"{self.directory / name}: not readable ({error})", code="model-unreadable") from None

    def _find_eos(self) -> list[int]:
        """The ids that end a completion: generation_config, then config, then a token with a usual name."""
        for name in ("generation_config.json", "config.json"):
            found = self._read_json(name).get("eos_token_id")
            if isinstance(found, int):
                return [found]
            if isinstance(found, list) and found:
                return [int(one) for one in found]
        for name in _END_NAMES:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return [int(token)]
        raise Rejected(f"model {str(self.directory)!r}: no eos_token_id in its config", code="model-unreadable")

    def _load_chat(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.directory), local_files_only=True)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt, ready for a completion to follow."""
        if self._chat is None:
            return list(self._tokenizer.encode(prompt).ids)
        text = self._chat.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_completion(self, completion: str) -> list[int]:
        """Token ids of a completion that ends: the end token is the last."""
        return [*self._tokenizer.encode(completion, add_special_tokens=False).ids, self.eos_ids[0]]

    def decode(self, tokens: list[int]) -> str:
        """Text of completion tokens, without special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
