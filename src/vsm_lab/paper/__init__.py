"""The paper's tables and figures: what is measured, the jobs it takes, and the report."""
