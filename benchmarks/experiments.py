"""Chains and trees at equal generated tokens, on the embedded engine: runs the grid and writes the page.

One cell is one whole run: rollout, log, learner, SDK and engine, evaluated at one or two points.
Finished cells are lines of a results file and are not run again; the page is made from that file alone.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.experiments run --jobs 2
    python -m benchmarks.experiments report
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experiment_plan import cells
from benchmarks.experiment_report import make_tables, write_report
from benchmarks.experiment_run import Workshop, run_cell
from engine.embedded.world import write_world

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "experiments.jsonl"
PAGE = ROOT / "docs" / "experiments.md"
HELD_OUT = 32
"""Held-out questions of each number of hops."""


def make_questions(folder: Path) -> Workshop:
    """Write the world of seed 0 and the mixed question files; return where they are."""
    files = write_world(folder / "world", 0)
    for split in ("train", "test"):
        lines = [
            line
            for name in (split, f"{split}_3hop")
            for line in files.questions[name].read_text(encoding="utf-8").splitlines()
        ]
        if split == "test":
            by_hops = [[line for line in lines if f'"world_{hops}hop"' in line] for hops in (1, 2, 3)]
            lines = [line for group in by_hops for line in group[:HELD_OUT]]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Workshop(folder, files.corpus, folder / "train.jsonl", folder / "test.jsonl")


def finished(results: Path) -> set[str]:
    """Return the names of the cells whose results are recorded."""
    if not results.exists():
        return set()
    return {json.loads(line)["cell"] for line in results.read_text(encoding="utf-8").splitlines()}


def run(results: Path, jobs: int, only: Sequence[str], seeds: Sequence[int]) -> None:
    """Run every cell that is not recorded yet, `jobs` at a time, and append each as it ends."""
    done = finished(results)
    wanted = [
        cell
        for cell in cells(seeds)
        if cell.name not in done and (not only or any(cell.name.startswith(start) for start in only))
    ]
    print(f"{len(done)} cells are recorded, {len(wanted)} are to be run", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="rolltape-experiments-"))
    try:
        shop = make_questions(folder)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            futures = [pool.submit(run_cell, cell, shop) for cell in wanted]
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    rows = future.result()
                    with results.open("a", encoding="utf-8") as file:
                        file.write("".join(json.dumps(row) + "\n" for row in rows))
                    print(f"{time.strftime('%H:%M:%S')} {number}/{len(wanted)} {tell(rows)}", flush=True)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tell(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line about a finished cell."""
    marks = (
        f"EM {row['exact_match']:.3f} at {row['generated']} tokens, {row['steps']} steps" for row in rows
    )
    seconds = sum(row["eval_seconds"] for row in rows) + rows[-1]["train_seconds"]
    return f"{rows[0]['cell']}: {'; '.join(marks)}; {seconds:.0f} s"


def main() -> None:
    """Run the grid, write the page from what is recorded, or print its tables (the default)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["run", "report", "show"], default="show")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; each has an engine process")
    parser.add_argument("--only", nargs="*", default=[], help="names of cells begin with one of these")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3])
    given = parser.parse_args()
    if given.action == "run":
        given.results.parent.mkdir(parents=True, exist_ok=True)
        run(given.results, given.jobs, given.only, given.seeds)
        return
    tables = make_tables(given.results)
    if given.action == "report":
        write_report(given.results, tables, PAGE)
    print("\n\n".join(tables.values()))


if __name__ == "__main__":
    main()
