"""``--help`` of the trainer and its shell stay light: torch is imported only when a worker starts."""

from __future__ import annotations

import subprocess
import sys


def test_the_shell_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, openrl_trainer.__main__, openrl_trainer.service;"
        "heavy = {'torch', 'transformers', 'peft', 'safetensors'} & set(sys.modules);"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
