"""A process that writes to a store until it is killed: TARGET LOG NAME.

Before each change it logs what it means to do, and after it that it was done.
"""

import itertools
import json
import os
import sys
from functools import partial

from store_helpers import ENCODER, small_memory, some_examples, take_in
from vsm.memory.named import NamedMemory
from vsm.stores import open_store

MANY = 1_000_000
AT_ONCE = 3


def main() -> None:
    target, log, name = sys.argv[1:]
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(**what: str) -> None:
        os.write(descriptor, json.dumps(what).encode() + b"\n")

    store = open_store(target)
    store.bind(ENCODER, small_memory())
    for number in itertools.count():
        label = f"{name}-{number}"
        task = store.create_task(label, MANY).id
        say(did="create", label=label, task=task)
        say(will="add", label=label, task=task)
        store.add_examples(task, label, some_examples(AT_ONCE, number), MANY)
        say(did="add", label=label, task=task)
        say(will="remember", label=label, task=task)
        store.remember(task, take_in)
        say(did="remember", label=label, task=task)
        if number % 3 == 1:
            say(will="forget", label=label, task=task)
            store.change_memory(partial(NamedMemory.forget, classes=[label]))
            say(did="forget", label=label, task=task)
        if number % 3 == 2:
            say(will="delete", label=label, task=task)
            store.delete_task(task)
            say(did="delete", label=label, task=task)


if __name__ == "__main__":
    main()
