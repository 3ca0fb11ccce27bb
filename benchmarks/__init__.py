"""Scripts that measure speed; they print and write their figures, and assert none."""
