"""What a release tag `<dist>-v<version>` names: prints `dist=` and `version=` for a workflow's output.

`python read_tag.py TAG`. Fails if the workspace has no such distribution, or if its metadata says another version.
"""

import re
import sys
import tomllib
from pathlib import Path


def main() -> None:
    tag = sys.argv[1]
    parts = re.fullmatch(r"(?P<dist>[a-z0-9-]+)-v(?P<version>\d+\.\d+\.\d+)", tag)
    if parts is None:
        sys.exit(f"{tag!r} is not a release tag: it must read <dist>-v<version>, such as topograph-loss-v0.2.0")
    projects = [
        tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for pattern in ("packages/*/pyproject.toml", "shared/pyproject.toml", "tools/pyproject.toml")
        for file in Path().glob(pattern)
    ]
    versions = {project["name"]: project["version"] for project in projects}
    dist, version = parts["dist"], parts["version"]
    if dist not in versions:
        sys.exit(f"the workspace has no distribution {dist!r}: it has {', '.join(sorted(versions))}")
    if versions[dist] != version:
        sys.exit(f"the tag says {dist} {version}, but its metadata says {versions[dist]}")
    print(f"dist={dist}\nversion={version}")


if __name__ == "__main__":
    main()
