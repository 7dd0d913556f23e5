"""Repeatable measurements against named peers. They print figures and assert none."""
