"""The long evidence: every method, three seeds, more steps. Resumable; `--minutes` bounds one sitting.

python benchmarks/evidence.py --store evidence.sqlite --minutes 3     # again until it says that all is done
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev

from chapbook_shared.jobs import Store
from llm_unlearn.authors import author_items
from llm_unlearn.demo import efficacy, load_model, measure, teach, trade_off, unlearned

METHODS = {
    "GA": {},
    "GA+GD": {},
    "NPO+GD": {},
    "NPO+KL": {},
    "DPO+GD": {},
    "ME+GD": {},
    "ME+GD, P to U": {"me_direction": "model_to_uniform"},
    "IDK+GD": {},
    "IDK+AP": {},
}
FORGET, RETAIN = (0, 1), (2, 3, 4, 5)
EPOCHS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="evidence.sqlite")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", help="write the trade-off plot here")
    options = parser.parse_args()
    start = time.monotonic()
    with Store(options.store, settings={"epochs": EPOCHS, "forget": FORGET, "retain": RETAIN}) as store:
        finished = run(store, options, start)
        if not finished:
            print("more to do: run again", file=sys.stderr)
            sys.exit(1)
        report(store, options.figure)


def run(store, options, start) -> bool:
    forget, retain = author_items(FORGET), author_items(RETAIN)
    sets = {"forget": forget, "retain": retain, "world": []}
    for seed in range(options.seeds):
        keys = [f"{seed}/{name}" for name in ("taught", *METHODS)]
        missing = store.missing(keys)
        if not missing:
            continue
        if time.monotonic() - start > 60 * options.minutes:
            return False
        folder = Path(tempfile.gettempdir()) / f"llm-unlearn-taught-{seed}"
        model, tokenizer = load_model()
        if f"{seed}/taught" in store and folder.exists():
            model = type(model).from_pretrained(folder)
        else:
            model = teach(model, tokenizer, [*forget, *retain], seed=seed)
            model.save_pretrained(folder)
            store.put(f"{seed}/taught", measure(model, tokenizer, sets, full=True), replace=True)
        for key in store.missing(keys):
            if time.monotonic() - start > 60 * options.minutes:
                return False
            name = key.partition("/")[2]
            method = name.partition(",")[0]
            with unlearned(
                model, tokenizer, method, forget, retain, seed=seed, epochs=EPOCHS, **METHODS[name]
            ) as changed:
                store.put(key, measure(changed, tokenizer, sets, full=True))
            print(key, json.dumps(store.get(key)), file=sys.stderr, flush=True)
    return True


def report(store, figure) -> None:
    runs = {}
    for key, record in store.items():
        runs.setdefault(key.partition("/")[2], []).append(record)
    print("| method | FE | forget P / ROUGE / key / idk / TE | retain P / ROUGE / key / idk | world |")
    print("|---|---|---|---|---|")
    for name, results in runs.items():
        fe = [efficacy(r["forget"]) for r in results]
        cells = [
            " / ".join(f"{fmean(r[part][c] for r in results):.2f}" for c in columns)
            for part, columns in (
                ("forget", ("probability", "rouge", "key", "idk", "token_entropy")),
                ("retain", ("probability", "rouge", "key", "idk")),
                ("world", ("probability",)),
            )
        ]
        spread = stdev(fe) if len(fe) > 1 else 0.0
        print(f"| {name} | {fmean(fe):.2f} ± {spread:.2f} | " + " | ".join(cells) + " |")
    if figure:
        trade_off(runs).savefig(figure, dpi=144, bbox_inches="tight")


if __name__ == "__main__":
    main()
