"""Studies: from a YAML file to jobs, a result file and a page."""
