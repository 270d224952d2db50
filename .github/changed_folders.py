"""Which distributions' folders changed since a commit: prints `folders=[…]` for a workflow's output.

`python changed_folders.py BASE`. A change to the common package or to the root concerns every folder; with a base that
cannot be found (a new branch, a forced push) all count as changed.
"""

import json
import subprocess
import sys
from pathlib import Path

EVERYTHING = ("shared/", "pyproject.toml", "uv.lock", "conftest.py")


def affected(changed: list[str], folders: list[str]) -> list[str]:
    if any(path.startswith(EVERYTHING) for path in changed):
        return folders
    return [folder for folder in folders if any(path.startswith(f"{folder}/") for path in changed)]


def main() -> None:
    folders = [*sorted(str(file.parent) for file in Path().glob("packages/*/pyproject.toml")), "shared", "tools"]
    done = subprocess.run(["git", "diff", "-z", "--name-only", sys.argv[1], "HEAD"], capture_output=True, text=True)
    found = folders if done.returncode else affected(done.stdout.split("\0"), folders)
    print(f"folders={json.dumps(found)}")


if __name__ == "__main__":
    main()
