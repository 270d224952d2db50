"""The main job: 200 instructions and 60 responses out of SmolLM2-135M-Instruct, killed in the middle and resumed, with all claims.

    python evidence/main_job.py --out main-job [--seed 0]

Writes the run, its dataset card, its rows as JSONL, and report.html into the folder, and prints the report.
"""

import argparse
from pathlib import Path

from chapbook_shared.embed import SentenceEmbedder
from chapbook_shared.progress import Progress
from magpie_synth import Run
from magpie_synth.card import write_card
from magpie_synth.demo import MAIN, evidence
from magpie_synth.exports import to_trl, write_rows
from magpie_synth.neighbors import annotate_neighbors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    report = evidence(options.out / "run", MAIN, seed=options.seed, progress=Progress(), conclusive=True)
    report.print()
    report.to_html(options.out / "report.html")
    run = Run(options.out / "run")
    rows = annotate_neighbors(list(run), embedder=SentenceEmbedder.minilm())
    names = ("min_neighbor_distance", "repeat_count", "min_similar_id")
    run.put_tags("neighbors", {row["id"]: {name: row[name] for name in names} for row in rows})
    write_rows(run, options.out / "rows.jsonl")
    write_rows(map(to_trl, run), options.out / "trl.jsonl")
    write_card(run, options.out / "card", title="SmolLM2 by its own template")


if __name__ == "__main__":
    main()
