"""The long evidence: every method, three seeds, more steps, and a model that never saw the forgotten authors.

Resumable; `--minutes` bounds one sitting.

python benchmarks/evidence.py --store evidence.sqlite --minutes 3     # again until it prints the table

What is expected, with the thresholds fixed before the run (means over the seeds):
(a) every method at least halves the probability of the forgotten answers;
(b) GA without a regulariser leaves less than a tenth of the retain probability;
(c) IDK+GD refuses more retain questions than IDK+AP, and IDK+AP refuses at least half of the forget questions;
(d) after ME+GD at most half of the secrets are left, and at most a quarter of the forget answers give another author's fact instead.
"""

import argparse
import json
import shutil
import sys
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
FORGET, RETAIN = (0, 1, 2), (3, 4, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="evidence.sqlite")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--figure", help="write the trade-off plot here")
    options = parser.parse_args()
    start = time.monotonic()
    with Store(options.store, settings={"epochs": options.epochs, "forget": FORGET, "retain": RETAIN}) as store:
        finished = run(store, options, start)
        if not finished:
            print("more to do: run again", file=sys.stderr)
            sys.exit(1)
        report(store, options.figure)


def run(store, options, start) -> bool:
    forget, retain = author_items(FORGET), author_items(RETAIN)
    sets = {"forget": forget, "retain": retain}
    for seed in range(options.seeds):
        keys = [f"{seed}/{name}" for name in ("taught", "never taught", *METHODS)]
        if not store.missing(keys):
            continue
        if time.monotonic() - start > 60 * options.minutes:
            return False
        folder = Path(f"{options.store}.taught-{seed}")
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
            if name == "never taught":
                stranger = teach(load_model()[0], tokenizer, retain, seed=seed)
                store.put(key, measure(stranger, tokenizer, sets, full=True))
            else:
                method = name.partition(",")[0]
                with unlearned(
                    model, tokenizer, method, forget, retain, seed=seed, epochs=options.epochs, **METHODS[name]
                ) as changed:
                    store.put(key, measure(changed, tokenizer, sets, full=True))
            print(key, json.dumps(store.get(key)), file=sys.stderr, flush=True)
        shutil.rmtree(folder)
    return True


def report(store, figure) -> None:
    runs = {}
    for key, record in store.items():
        runs.setdefault(key.partition("/")[2], []).append(record)

    def values(name, part, metric):
        return [r[part][metric] for r in runs[name]]

    def cell(numbers):
        return f"{fmean(numbers):.2f} ± {stdev(numbers):.2f}" if len(numbers) > 1 else f"{numbers[0]:.2f}"

    columns = {
        "forget": ("probability", "rouge", "key", "wrong", "idk", "token_entropy"),
        "retain": ("probability", "rouge", "key", "idk"),
        "world": ("probability",),
    }
    flat = [(part, metric) for part, metrics in columns.items() for metric in metrics]
    print("| method | FE | " + " | ".join(f"{part} {metric}" for part, metric in flat) + " |")
    print("|---" * (2 + len(flat)) + "|")
    for name, results in runs.items():
        cells = [cell([efficacy(r["forget"]) for r in results]), *(cell(values(name, *place)) for place in flat)]
        print(f"| {name} | " + " | ".join(cells) + " |")

    def mean(name, part, metric):
        return fmean(values(name, part, metric))

    left = {name: mean(name, "forget", "probability") / mean("taught", "forget", "probability") for name in METHODS}
    kept = mean("GA", "retain", "probability") / mean("taught", "retain", "probability")
    gd, ap = mean("IDK+GD", "retain", "idk"), mean("IDK+AP", "retain", "idk")
    refused = mean("IDK+AP", "forget", "idk")
    secrets, wrong = mean("ME+GD", "forget", "key"), mean("ME+GD", "forget", "wrong")
    for letter, holds, measured in (
        ("a", max(left.values()) <= 0.5, ", ".join(f"{name} leaves {share:.2f}" for name, share in left.items())),
        ("b", kept < 0.1, f"GA leaves {kept:.2g} of the retain probability"),
        ("c", gd > ap and refused >= 0.5, f"retain refusals: IDK+GD {gd:.2f}, IDK+AP {ap:.2f}; forget refusals of IDK+AP {refused:.2f}"),
        ("d", secrets <= 0.5 * mean("taught", "forget", "key") and wrong <= 0.25, f"ME+GD: secrets {secrets:.2f}, others' facts {wrong:.2f}"),
    ):  # fmt: skip
        print(f"({letter}) {'holds' if holds else 'does not hold'}: {measured}")
    if figure:
        trade_off(runs).savefig(figure, dpi=144, bbox_inches="tight")


if __name__ == "__main__":
    main()
