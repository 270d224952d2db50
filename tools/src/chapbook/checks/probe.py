"""Runs inside an environment under test, with the standard library alone: `python probe.py JOB ANSWER ARGUMENTS…`.

The answer is written as JSON to a file, since what is imported may print.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial


def face(import_name: str, install: str, *modules: str) -> list[str]:
    """Everything in `__all__` is there, and each module imports; what lacks an extra must say how to get it."""
    problems = []
    package = importlib.import_module(import_name)
    names = getattr(package, "__all__", None)
    if names is None:
        names = []
        problems.append("the package has no __all__")
    for name in names:
        problems += attempt(f"{import_name}.{name}", install, partial(getattr, package, name))
    for module in modules:
        problems += attempt(module, install, partial(importlib.import_module, module))
    return problems


def attempt(what: str, install: str, action: Callable[[], object]) -> list[str]:
    try:
        action()
    except ImportError as error:
        if "pip install" not in str(error) or install not in str(error):
            right = f"it should raise ImportError with the line pip install '{install}[…]'"
            return [f"{what} needs what is not installed, and says {type(error).__name__}: {error}; {right}"]
    except (Exception, SystemExit) as error:
        return [f"{what} raises {type(error).__name__}: {error}"]
    return []


def seconds(import_name: str, *before: str) -> dict[str, float]:
    """CPU time of the import, with the modules of `before` imported already. CPU time: a busy machine adds none."""
    for module in before:
        importlib.import_module(module)
    start = time.process_time()
    importlib.import_module(import_name)
    return {"seconds": time.process_time() - start, "torch": "torch" in sys.modules}


def loaded(*modules: str) -> list[str]:
    """Top-level names in sys.modules after importing these."""
    for module in modules:
        importlib.import_module(module)
    return sorted({name.partition(".")[0] for name in sys.modules})


if __name__ == "__main__":
    job, answer, *arguments = sys.argv[1:]
    jobs: dict[str, Callable[..., object]] = {"face": face, "seconds": seconds, "loaded": loaded}
    result = jobs[job](*arguments)
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(result, file)
