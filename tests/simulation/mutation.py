"""Break one rule on purpose: a function with one piece of its source replaced, for the length of a test.

``python -m simulation.mutation WORDS FIRST:END`` says which of these seeds catch the mutants with these words in their
names, and how: where schedules have changed, a mutant may need others than it had.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def mutated(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """Replace ``old``, which must be there exactly once, by ``new`` in the source of a module's function or a method.

    Raises:
        AssertionError: the source has changed and the mutation no longer says what it breaks.
    """
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times, not once"
    module = sys.modules[function.__module__]
    before = dict(module.__dict__)
    code = compile(source.replace(old, new), module.__file__ or "", "exec", __future__.annotations.compiler_flag)
    exec(code, module.__dict__)
    changed = module.__dict__[function.__name__]
    owner, _, _ = function.__qualname__.rpartition(".")
    places: list[tuple[Any, str]] = []
    if owner:
        module.__dict__.pop(function.__name__)
        if function.__name__ in before:
            module.__dict__[function.__name__] = before[function.__name__]
        places.append((before[owner], function.__name__))
    else:
        module.__dict__[function.__name__] = function
        ours = [each for name, each in sys.modules.items() if name.startswith("openrl_")]
        places += [(each, function.__name__) for each in ours if vars(each).get(function.__name__) is function]
    try:
        for place, name in places:
            setattr(place, name, changed)
        yield
    finally:
        for place, name in places:
            setattr(place, name, function)


def main() -> int:
    from simulation.run import simulate
    from simulation.test_mutants import MUTANTS

    words, seeds = sys.argv[1], range(*map(int, sys.argv[2].split(":")))
    found = 0
    for mutant in (each for each in MUTANTS if words in each.name):
        with mutant.broken():
            for seed in seeds:
                violation = simulate(seed).violation
                if violation:
                    found += 1
                    print(f"{mutant.name}: seed {seed}: {violation}", flush=True)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
