"""What a job is trained on: prompts, a reward, and (for SFT) demonstrations (C4).

A task is named in one of three ways:
- ``letters:sort`` or ``letters:desc``: sort 3 to 5 random letters; built in, what the demo trains on;
- ``reasoning-gym:NAME`` or just ``NAME``: any dataset of reasoning-gym; its verifier is the reward;
- ``path/to/file.py:function`` or ``package.module:function``: the user's own. A function without parameters returns a
  Task; a function ``(prompt, completion, entry) -> float`` is the reward of the prompts in ``--prompts FILE.jsonl``
  (one JSON object a line with ``prompt`` and, if demonstrations are wanted, ``answer``).

Held-out prompts are never in the training split.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import itertools
import math
import random
import string
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from openrl_client.errors import Rejected

Split = Literal["train", "held-out"]
Reward = Callable[[str, str, dict[str, Any]], float]

REASONING_GYM = "reasoning-gym"
HELD_OUT_FRACTION = 0.1
GYM_SIZE = 1000
PROMPTS_MAX = 1_000_000


class Example(msgspec.Struct, frozen=True):
    """One prompt. ``answer`` is a demonstration (None: there is none); ``entry`` is what the reward is given."""

    prompt: str
    answer: str | None = None
    entry: dict[str, Any] = {}


class Task(Protocol):
    """Anything with these four members is a task."""

    name: str

    def examples(self, split: Split) -> Sequence[Example]:
        """The prompts of a split, always the same ones."""

    def reward(self, example: Example, completion: str, finished: bool) -> float:
        """Score one completion; ``finished``: it ended by itself (eos), not by the token limit."""

    def demonstration(self, example: Example, randomness: random.Random) -> str | None:
        """A completion to imitate (SFT); None: this example has none."""


class FunctionTask:
    """A task from lists of examples and a reward function: what a user's function returns.

    Args:
        reward: ``(prompt, completion, entry) -> float``.
        held_out: None takes every tenth example out of ``train``.
    """

    def __init__(
        self, name: str, reward: Reward, train: Sequence[Example], held_out: Sequence[Example] | None = None
    ) -> None:
        self.name = name
        self._reward = reward
        if held_out is None:
            step = round(1 / HELD_OUT_FRACTION)
            train, held_out = ([e for i, e in enumerate(train) if i % step], list(train)[::step])
        if not train or not held_out:
            raise Rejected(f"task {name!r}: needs at least two prompts, one of them held out", code="bad-task")
        self._splits: dict[Split, Sequence[Example]] = {"train": train, "held-out": held_out}

    def examples(self, split: Split) -> Sequence[Example]:
        return self._splits[split]

    def reward(self, example: Example, completion: str, finished: bool) -> float:
        value = self._reward(example.prompt, completion, example.entry)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise _no_number(self.name, completion, value) from None

    def demonstration(self, example: Example, randomness: random.Random) -> str | None:
        return example.answer


def reward_of(task: Task, example: Example, completion: str, finished: bool) -> float:
    """The reward as a finite number.

    Raises:
        Rejected: ``bad-task``: the task's code failed (where, and why), or gave no finite number.
    """
    try:
        value = task.reward(example, completion, finished)
    except Rejected:
        raise
    except Exception as error:  # the user's function may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise Rejected(
            f"task {task.name}: its reward failed on {completion[:40]!r}: {type(error).__name__}: {_one_line(error)} "
            f"({last.filename}, line {last.lineno})",
            code="bad-task",
        ) from error
    if not math.isfinite(value):
        raise _no_number(task.name, completion, value)
    return value


def _no_number(task: str, completion: str, value: object) -> Rejected:
    return Rejected(
        f"task {task}: its reward of {completion[:40]!r} is {repr(value)[:60]}: return a number", code="bad-task"
    )


# --- the built-in task ------------------------------------------------------------------------------------------


class LetterTask:
    """Sort 3 to 5 letters: ``sort dbca=`` → ``abcd``, ``desc dbca=`` → ``dcba``. Reward 1 for the exact answer.

    Demonstrations are noisy on purpose: with probability ``noise`` two neighbouring letters of the answer are
    swapped, so that a policy that imitates them is right about half of the time and GRPO has something to fix.
    """

    def __init__(self, variant: str, *, noise: float = 0.5, num_train: int = 4000, num_held_out: int = 400) -> None:
        if variant not in ("sort", "desc"):
            raise Rejected(
                f"task letters:{variant or '?'} is not known: use letters:sort or letters:desc", code="bad-task"
            )
        self.name = f"letters:{variant}"
        self._variant = variant
        self._noise = noise
        # The same words whatever the variant and the process: the base model's training leaves the held-out ones out.
        randomness = random.Random(20240607)
        words: dict[str, None] = {}
        while len(words) < num_train + num_held_out:
            length = randomness.choice((3, 4, 5))
            words["".join(randomness.sample(string.ascii_lowercase, length))] = None
        examples = [self._example(word) for word in words]
        self._splits: dict[Split, list[Example]] = {
            "held-out": examples[:num_held_out],
            "train": examples[num_held_out:],
        }

    def _example(self, word: str) -> Example:
        answer = "".join(sorted(word, reverse=self._variant == "desc"))
        return Example(prompt=f"{self._variant} {word}=", answer=answer)

    def examples(self, split: Split) -> Sequence[Example]:
        return self._splits[split]

    def reward(self, example: Example, completion: str, finished: bool) -> float:
        return 1.0 if finished and completion == example.answer else 0.0

    def demonstration(self, example: Example, randomness: random.Random) -> str | None:
        letters = list(example.answer or "")
        if randomness.random() < self._noise:
            at = randomness.randrange(len(letters) - 1)
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
        return "".join(letters)


# --- reasoning-gym ----------------------------------------------------------------------------------------------


class GymTask:
    """A dataset of reasoning-gym; its own ``score_answer`` is the reward, on the last line that is not empty.

    Args:
        config: passed to ``reasoning_gym.create_dataset`` (for example ``{"max_terms": 2}``).
    """

    def __init__(
        self, dataset: str, *, size: int = GYM_SIZE, seed: int = 0, config: dict[str, Any] | None = None
    ) -> None:
        try:
            gym: Any = importlib.import_module("reasoning_gym")
        except ImportError:
            raise Rejected(
                f"task {dataset!r} needs reasoning-gym: pip install reasoning-gym", code="missing-package"
            ) from None
        self.name = f"{REASONING_GYM}:{dataset}"
        try:
            self._data = gym.create_dataset(dataset, size=size, seed=seed, **(config or {}))
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            why = _one_line(error)
            if "not registered" in why:
                why = "use letters:sort, letters:desc, FILE.py:FUNCTION or a dataset of reasoning-gym"
                if near := difflib.get_close_matches(dataset, gym.factory.DATASETS, n=3):
                    why += f", for example {', '.join(near)}"
                raise Rejected(f"task {dataset!r} is not known: {why}", code="bad-task") from None
            if unknown := sorted(set(config or {}) - set(known := _settings(gym, dataset))):
                why = f"no setting {unknown[0]!r} in --task-config: it has {', '.join(known)}"
            raise Rejected(f"task {dataset!r}: {why}", code="bad-task") from None
        num_held_out = max(1, int(size * HELD_OUT_FRACTION))
        if size < 2:
            raise Rejected(f"task {dataset!r}: size {size} is too small, use at least 2", code="bad-task")
        entries = [dict(self._data[index]) for index in range(size)]
        held_out = entries[:num_held_out]
        questions = {entry["question"] for entry in held_out}
        train = [entry for entry in entries[num_held_out:] if entry["question"] not in questions]
        if not train:
            raise Rejected(f"task {dataset!r}: every training prompt is also held out: raise its size", code="bad-task")
        self._splits: dict[Split, list[Example]] = {
            "held-out": [self._example(entry) for entry in held_out],
            "train": [self._example(entry) for entry in train],
        }

    @staticmethod
    def _example(entry: dict[str, Any]) -> Example:
        return Example(prompt=f"{entry['question']}\n", answer=str(entry["answer"]), entry=entry)

    def examples(self, split: Split) -> Sequence[Example]:
        return self._splits[split]

    def reward(self, example: Example, completion: str, finished: bool) -> float:
        lines = [line.strip() for line in completion.splitlines() if line.strip()]
        return float(self._data.score_answer(lines[-1] if lines else None, example.entry))

    def demonstration(self, example: Example, randomness: random.Random) -> str | None:
        return example.answer


def _settings(gym: Any, dataset: str) -> list[str]:
    """What a data set lets one set; its size and seed come from elsewhere."""
    _, settings = gym.factory.DATASETS[dataset]
    return [field.name for field in dataclasses.fields(settings) if field.name not in ("size", "seed")]


# --- by name ----------------------------------------------------------------------------------------------------


def load_task(
    name: str, *, prompts: Path | None = None, size: int = GYM_SIZE, config: dict[str, Any] | None = None
) -> Task:
    """Return the task ``name`` (see the module's docstring).

    Raises:
        Rejected: ``bad-task`` or ``missing-package``, with what to do.
    """
    kind, _, rest = name.rpartition(":")
    is_letters = kind == "letters" or name == "letters"
    is_gym = not is_letters and kind in ("", REASONING_GYM)
    if is_gym and rest.endswith(".py"):
        raise Rejected(f"task {name!r} names no function: write {name}:FUNCTION", code="bad-task")
    if prompts is not None and (is_letters or is_gym):
        raise Rejected(f"task {name!r} has its own prompts: --prompts is for FILE.py:FUNCTION", code="bad-task")
    if config is not None and not is_gym:
        raise Rejected(f"task {name!r} takes no --task-config: that is for a reasoning-gym dataset", code="bad-task")
    if is_letters:
        return LetterTask(rest if kind else "")
    if is_gym:
        return GymTask(rest, size=size, config=config)
    return _user_task(name, _load_function(kind, rest), prompts)


def _load_function(source: str, function: str) -> Callable[..., Any]:
    try:
        if source.endswith(".py"):
            path = Path(source)
            if not path.is_file():
                raise Rejected(f"task file {source!r} does not exist", code="bad-task")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None:
                raise Rejected(f"task file {source!r} is not a Python file", code="bad-task")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(path.stem, module)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        found = getattr(module, function)
    except Rejected:
        raise
    except AttributeError:
        raise Rejected(f"task {source}:{function}: {source} has no function {function!r}", code="bad-task") from None
    except Exception as error:  # the user's module may raise anything while it is imported
        raise Rejected(
            f"task {source}:{function}: cannot import {source}: {_one_line(error)}", code="bad-task"
        ) from None
    if not callable(found):
        raise Rejected(f"task {source}:{function}: {function} is not a function", code="bad-task")
    return found  # type: ignore[no-any-return]


def _user_task(name: str, function: Callable[..., Any], prompts: Path | None) -> Task:
    signature = inspect.signature(function)
    if signature.parameters:
        try:
            signature.bind("prompt", "completion", {})
        except TypeError:
            raise Rejected(
                f"task {name!r} takes {signature}: a reward function takes (prompt, completion, entry)", code="bad-task"
            ) from None
        if prompts is None:
            raise Rejected(
                f"task {name!r} is a reward function: name its prompts with --prompts FILE.jsonl", code="bad-task"
            )
        return FunctionTask(name, function, _read_prompts(prompts))
    try:
        task = function()
    except Rejected:
        raise
    except Exception as error:
        raise Rejected(f"task {name!r} failed: {type(error).__name__}: {_one_line(error)}", code="bad-task") from error
    for member in ("name", "examples", "reward", "demonstration"):
        if not hasattr(task, member):
            raise Rejected(
                f"task {name!r} returned a {type(task).__name__} without {member!r}: return a Task or a FunctionTask",
                code="bad-task",
            )
    return task  # type: ignore[no-any-return]


def _read_prompts(path: Path) -> list[Example]:
    examples: list[Example] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(itertools.islice(lines, PROMPTS_MAX), 1):
                if not line.strip():
                    continue
                entry = msgspec.json.decode(line, type=dict[str, Any])
                if not isinstance(entry.get("prompt"), str):
                    raise Rejected(f"{path}, line {number}: no text under 'prompt'", code="bad-task")
                answer = entry.get("answer")
                examples.append(Example(entry["prompt"], None if answer is None else str(answer), entry))
    except OSError as error:
        raise Rejected(f"prompts {str(path)!r} cannot be read: {error.strerror}", code="bad-task") from None
    except msgspec.MsgspecError as error:
        raise Rejected(f"{path}, line {number}: not a JSON object ({error})", code="bad-task") from None
    return examples


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
