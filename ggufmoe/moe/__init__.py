"""Decisions: what a model costs and what goes where. Values only: no file, thread or clock."""
