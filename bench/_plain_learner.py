"""The learner's inner loop and nothing else: what `overhead.py` compares an island with.

Same task, optimizer and step function; no blackboard, no threads, no other process. After every step it writes
(steps so far, monotonic seconds) into the 16 bytes of a file.
"""

from __future__ import annotations

import argparse
import os
import struct
import time

import torch

from diloco_runtime.config import RunConfig
from diloco_runtime.data_cursor import DataCursor
from diloco_runtime.inner import build_optimizer, take_step
from diloco_runtime.records import Position
from diloco_runtime.task import TaskContext, load_task

COUNT = struct.Struct("<qd")


def main() -> None:
    """Step until killed."""
    parser = argparse.ArgumentParser()
    for name in ("config", "root", "count"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    with open(arguments.config) as file:
        config = RunConfig.model_validate_json(file.read())
    torch.set_num_threads(config.inner.threads)
    task = load_task(TaskContext(config, torch.device("cpu"), arguments.root))
    optimizer = build_optimizer(task.model, config.inner)
    cursor = DataCursor(task.unit_samples, Position())
    count = os.open(arguments.count, os.O_RDWR | os.O_CREAT)
    steps = unit = 0
    while True:
        while cursor.wanted():
            cursor.claimed(unit // task.num_units(), unit % task.num_units())
            unit += 1
        part = cursor.take(config.inner.batch_size)
        batch = task.batch(part.data_pass, part.unit_index, part.start, part.count)
        take_step(task, optimizer, batch, config.inner.lr, config.inner.grad_clip)
        steps += 1
        os.pwrite(count, COUNT.pack(steps, time.monotonic()), 0)


if __name__ == "__main__":
    main()
