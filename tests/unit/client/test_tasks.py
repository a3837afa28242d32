"""Tasks: built in, of reasoning-gym, the user's own (C4)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from openrl_client.errors import Rejected
from openrl_client.tasks import Example, FunctionTask, LetterTask, load_task, reward_of


@pytest.mark.parametrize(("variant", "answer"), [("sort", "abcd"), ("desc", "dcba")])
def test_letters_reward_the_exact_answer_that_ends(variant: str, answer: str) -> None:
    task = LetterTask(variant)
    example = Example(prompt=f"{variant} dbca=", answer=answer)
    assert task.reward(example, answer, True) == 1.0
    assert task.reward(example, answer, False) == 0.0
    assert task.reward(example, answer + "a", True) == 0.0


def test_letters_hold_out_the_same_prompts_everywhere() -> None:
    """C4: held-out prompts are never trained on, in any variant and any process."""
    sort, desc = LetterTask("sort"), LetterTask("desc")
    words = [{e.prompt.split()[1] for e in task.examples("held-out")} for task in (sort, desc)]
    assert words[0] == words[1]
    trained = {e.prompt.split()[1] for task in (sort, desc) for e in task.examples("train")}
    assert not trained & words[0]
    assert all(e.answer == "".join(sorted(e.prompt[5:-1])) for e in sort.examples("held-out"))


def test_letters_demonstrations_are_wrong_half_of_the_time() -> None:
    task = LetterTask("sort")
    randomness = random.Random(1)
    examples = task.examples("train")[:1000]
    right = sum(task.demonstration(e, randomness) == e.answer for e in examples)
    assert 430 < right < 570


def test_reasoning_gym_dataset_by_name_scores_with_its_own_verifier() -> None:
    """C4: any dataset by name; its verifier is the reward, on the last line."""
    task = load_task("chain_sum", size=40, config={"max_terms": 2})
    example = task.examples("held-out")[0]
    assert task.reward(example, f"let me think\n{example.answer}\n", True) == 1.0
    assert task.reward(example, "nonsense", True) < 0.5
    assert task.name == "reasoning-gym:chain_sum"
    held_out = {e.prompt for e in task.examples("held-out")}
    assert not held_out & {e.prompt for e in task.examples("train")}
    assert load_task("reasoning-gym:chain_sum", size=40).name == task.name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_dataset", "no_such_dataset"),
        ("letters:shuffle", "letters:sort or letters:desc"),
        ("missing.py:score", "'missing.py' does not exist"),
        ("no_such_module_here:score", "cannot import no_such_module_here"),
        ("json:no_such", "has no function 'no_such'"),
    ],
)
def test_unusable_task_is_one_clear_line(name: str, said: str) -> None:
    with pytest.raises(Rejected, match=said) as caught:
        load_task(name)
    assert "\n" not in str(caught.value)
    assert caught.value.code == "bad-task"


def test_users_reward_function_with_prompts(tmp_path: Path) -> None:
    """C4: a Python function of the user's is the reward of the prompts in a file."""
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, completion, entry):\n    return float(completion == entry['answer'])\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(20)))
    task = load_task(f"{file}:score", prompts=prompts)
    assert len(task.examples("train")) == 18
    example = task.examples("held-out")[1]
    assert (example.prompt, task.reward(example, "10", True), task.reward(example, "9", True)) == ("10", 1.0, 0.0)
    with pytest.raises(Rejected, match="--prompts"):
        load_task(f"{file}:score")


def test_users_function_that_returns_a_task(tmp_path: Path) -> None:
    file = tmp_path / "whole.py"
    file.write_text(
        "from openrl_client.tasks import Example, FunctionTask\n"
        "def task():\n"
        "    return FunctionTask('mine', lambda p, c, e: 1.0, [Example('a'), Example('b')], [Example('c')])\n"
        "def nothing():\n"
        "    return 3\n"
    )
    assert [e.prompt for e in load_task(f"{file}:task").examples("held-out")] == ["c"]
    with pytest.raises(Rejected, match="returned a int without 'name'"):
        load_task(f"{file}:nothing")


def test_what_a_task_would_not_use_is_refused(tmp_path: Path) -> None:
    """C5: not trained on something else without a word."""
    (tmp_path / "user_tasks.py").write_text("def score(prompt, completion, entry):\n    return 1\n")
    for name in ("letters:sort", "chain_sum"):
        with pytest.raises(Rejected, match=f"'{name}' has its own prompts: --prompts is for FILE.py:FUNCTION"):
            load_task(name, prompts=tmp_path / "prompts.jsonl")
    with pytest.raises(Rejected, match=r"names no function: write user_tasks\.py:FUNCTION"):
        load_task("user_tasks.py", prompts=tmp_path / "prompts.jsonl")
    with pytest.raises(
        Rejected, match=r"'chain_sum': no setting 'terms' in --task-config: it has min_terms, max_terms"
    ):
        load_task("chain_sum", config={"terms": 2})
    for name in ("letters:sort", f"{tmp_path / 'user_tasks.py'}:score"):
        with pytest.raises(Rejected, match="takes no --task-config"):
            load_task(name, config={"max_terms": 2})


def test_prompts_file_with_a_bad_line_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text("def score(prompt, completion, entry):\n    return 0.0\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\nnot json\n')
    with pytest.raises(Rejected, match="line 2"):
        load_task(f"{file}:score", prompts=prompts)


def test_task_without_held_out_prompts_is_refused() -> None:
    with pytest.raises(Rejected, match="at least two prompts"):
        FunctionTask("t", lambda p, c, e: 0.0, [Example("a")])


def _raises(*_: Any) -> float:
    raise KeyError("no such\nthing")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (_raises, r"task mine: its reward failed on 'text': KeyError: .*test_tasks.py, line \d+"),
        (lambda *_: None, "is None: return a number"),
        (lambda *_: "good", "is 'good': return a number"),
        (lambda *_: float("nan"), "is nan: return a number"),
        (lambda *_: float("-inf"), "is -inf"),
    ],
)
def test_a_reward_that_fails_or_is_no_number_is_said_in_one_line(reward: Any, said: str) -> None:
    """C5: it was a traceback, or a NaN that the trainer refused some steps later."""
    task = FunctionTask("mine", reward, [Example("a"), Example("b")])
    with pytest.raises(Rejected, match=said) as refused:
        reward_of(task, Example("a"), "text", True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def score(one, two): return 1.0",
            r"takes \(one, two\): a reward function takes \(prompt, completion, entry\)",
        ),
        ("def score(): return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_a_task_is_refused_before_the_job_is_published(
    tmp_path: Path, body: str, said: str
) -> None:
    file = tmp_path / f"mine{len(body)}.py"
    file.write_text(body)
    with pytest.raises(Rejected, match=said):
        load_task(f"{file}:score", prompts=None)


@pytest.mark.parametrize(("name", "hint"), [("letters", "letters:sort"), ("basic_arithmetik", "basic_arithmetic")])
def test_an_unknown_name_says_what_to_use(name: str, hint: str) -> None:
    with pytest.raises(Rejected, match=hint):
        load_task(name)
