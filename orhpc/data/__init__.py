"""Prompts of the user: read once from their source, and written as the task files of a run."""
