"""Pack OUT/*.jsonl of `sample_smollm2.py` into the package's data: python evidence/pack.py OUT

A variant that is not in OUT keeps the samples packed before.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from sample_smollm2 import VARIANTS

TARGET = Path(__file__).parents[1] / "src" / "mmd_equality" / "data" / "smollm2_samples.jsonl.gz"
KEPT = ("prompt_id", "completion", "codepoints", "error", "finish_reason", "usage", "max_tokens")


def pack(folder: Path) -> int:
    packed = gzip.decompress(TARGET.read_bytes()).decode("utf-8").splitlines() if TARGET.exists() else []
    lines = []
    for variant in VARIANTS:
        path = folder / f"{variant}.jsonl"
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                kept = {k: row[k] for k in KEPT if k in row}
                lines.append(json.dumps({"variant": variant, **kept}, ensure_ascii=False))
        else:
            lines += [line for line in packed if json.loads(line)["variant"] == variant]
    # No time stamp: the same samples give the same bytes.
    TARGET.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode("utf-8"), mtime=0))
    return len(lines)


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])), "completions in", TARGET)
