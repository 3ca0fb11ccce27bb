"""Experiments: plan, jobs, results, page."""
