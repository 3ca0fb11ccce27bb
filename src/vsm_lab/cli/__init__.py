"""The lab's commands; ``vsm`` finds them by name."""
