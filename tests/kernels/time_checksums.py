"""`python -m tests.kernels.time_checksums`: what comparing packed experts with their checksums costs here.

Prints how fast one thread compares, the first calls after a start that finds packed experts, and calls of one
row alone and next to a thread that compares for a fifth of its time, in turns.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from moebius.kernels import ExpertEngine, SegmentSettings

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, CHOSEN = 2048, 1024, 32, 4, 8
SHARE = 0.2
ALL = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def make(path: Path) -> ExpertEngine:
    """On two threads, with experts of 12.6 MB in bfloat16."""
    held = {layer: tuple(range(EXPERTS)) for layer in range(LAYERS)}
    segment = SegmentSettings(str(path), "checkpoint=1\n", held)
    return ExpertEngine(
        HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, weight_format="bfloat16", num_threads=2, segment=segment
    )


def calls(engine: ExpertEngine, count: int) -> list[float]:
    """Returns the milliseconds of each call with one row."""
    rng, spent = np.random.default_rng(1), []
    for number in range(count):
        rows = rng.standard_normal((1, HIDDEN)).astype(np.float32)
        ids = rng.choice(EXPERTS, CHOSEN, replace=False).astype(np.int32)[None]
        begin = time.perf_counter()
        engine.forward(number % LAYERS, rows, ids, np.full((1, CHOSEN), 1 / CHOSEN, np.float32))
        spent.append(1e3 * (time.perf_counter() - begin))
    return spent


def compare(engine: ExpertEngine, stop: threading.Event) -> None:
    """Compares as an expert server's watch does."""
    while True:
        for layer, expert in ALL:
            begin = time.perf_counter()
            engine.verify_expert(layer, expert)
            if stop.wait((time.perf_counter() - begin) * (1 / SHARE - 1)):
                return


def main() -> None:
    """Prints everything."""
    rng = np.random.default_rng(0)
    gate = rng.standard_normal((INTERMEDIATE, HIDDEN), dtype=np.float32)
    down = rng.standard_normal((HIDDEN, INTERMEDIATE), dtype=np.float32)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "expert-0.weights"
        engine = make(path)
        for layer, expert in ALL:
            engine.load_expert(layer, expert, gate, gate, down)
        engine.finish_load("")
        size, begin = engine.packed_expert(0, 0).nbytes, time.perf_counter()
        for layer, expert in ALL:
            engine.verify_expert(layer, expert)
        rate = size * len(ALL) / (time.perf_counter() - begin) / 1e9
        print(f"one thread compares {rate:.1f} GB/s; an expert has {size / 1e6:.1f} MB")
        del engine
        engine = make(path)
        print("first calls after a start, ms:", [round(spent, 1) for spent in calls(engine, 12)])
        for layer, expert in ALL:
            engine.verify_expert(layer, expert)
        alone, beside = list[float](), list[float]()
        for _ in range(12):
            alone += calls(engine, 100)
            stop = threading.Event()
            thread = threading.Thread(target=compare, args=(engine, stop))
            thread.start()
            beside += calls(engine, 100)
            stop.set()
            thread.join()
        for name, found in (("alone", alone), ("while experts are compared", beside)):
            shares = [round(float(share), 2) for share in np.percentile(found, [1, 10, 50])]
            print(f"a call {name}, ms, 1 %, 10 %, median: {shares}")


if __name__ == "__main__":
    main()
